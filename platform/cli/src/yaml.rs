//! Reads hand-written YAML, with readable errors.

use std::borrow::Cow;

use serde::de::DeserializeOwned;
use serde_saphyr::{Error, MessageFormatter, Options, RenderOptions, UserMessageFormatter};

/// Reads one document. Scalars on which versions of YAML disagree remain text: `No` (a boolean in 1.1), `010` (eight in
/// 1.1, ten in 1.2) and `1_000`.
///
/// Errors are those of [`problem`].
pub(crate) fn read<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    let mut options = Options::default();
    options.strict_booleans = true;
    options.leading_zero_numbers_as_strings = true;
    options.underscored_numbers_as_strings = true;
    serde_saphyr::from_str_with_options(text, options).map_err(|error| problem(&error))
}

/// The error with its position and the surrounding lines. The library's own text is advice for programmers.
pub(crate) fn problem(error: &Error) -> String {
    let text = error.render_with_options(RenderOptions::new(&Plain));
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    // The caller that read the file adds its name to the error.
    let lines: Vec<_> = text.lines().filter(|line| !line.trim_start().starts_with("--> <input>")).collect();
    lines.join("\n").trim_end().to_owned()
}

struct Plain;

impl MessageFormatter for Plain {
    fn format_message<'a>(&self, error: &'a Error) -> Cow<'a, str> {
        match error {
            Error::WithSnippet { error, .. } => self.format_message(error),
            Error::MultipleDocuments { .. } => {
                "a second document begins here; put it into a separate file".into()
            }
            Error::DuplicateMappingKey { key: Some(key), .. } => {
                format!("the key `{key}` is there twice").into()
            }
            error => UserMessageFormatter.format_message(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn problems_are_for_people() {
        for (text, expected) in [
            ("a: 1\na: 2\n", "line 2 column 1: the key `a` is there twice"),
            ("a: 1\n---\nb: 2\n", "a second document begins here"),
            ("a: [", "line 1"),
            ("a: *b\n", "unknown"),
        ] {
            let error = read::<Value>(text).unwrap_err();
            assert!(error.contains(expected), "{text:?}: {error}");
            for word in ["Options", "from_str", "error:", "<input>"] {
                assert!(!error.contains(word), "{text:?}: {error}");
            }
        }
    }
}
