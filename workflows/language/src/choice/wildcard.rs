//! The patterns of `StringMatches`: `*` is any text, `\*` an asterisk, `\\` a backslash.

use std::sync::Arc;

/// A compiled pattern: literal parts with any text between them.
#[derive(Clone, Debug)]
pub(super) struct Wildcard {
    parts: Arc<[String]>,
}

impl Wildcard {
    pub(super) fn new(source: &str) -> Self {
        let mut parts = vec![String::new()];
        let mut letters = source.chars();
        while let Some(letter) = letters.next() {
            match letter {
                '*' => parts.push(String::new()),
                plain => {
                    let plain = if plain == '\\' { letters.next().unwrap_or('\\') } else { plain };
                    if let Some(part) = parts.last_mut() {
                        part.push(plain);
                    }
                }
            }
        }
        Self { parts: parts.into() }
    }

    /// Whether the whole text matches. Takes the first match of each part, which suffices without backtracking.
    pub(super) fn matches(&self, text: &str) -> bool {
        let [first, middle @ .., last] = &*self.parts else {
            return self.parts.first().is_some_and(|only| only == text);
        };
        let Some(mut rest) = text.strip_prefix(first.as_str()) else { return false };
        for part in middle {
            match rest.find(part.as_str()) {
                Some(at) => rest = &rest[at + part.len()..],
                None => return false,
            }
        }
        rest.ends_with(last.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns() {
        for (pattern, text, expected) in [
            ("foo*.log", "foo.log", true),
            ("foo*.log", "foobar.log", true),
            ("foo*.log", "foobar.lo", false),
            ("*", "", true),
            ("", "", true),
            ("", "a", false),
            ("a*b*c", "a1b2c", true),
            ("a*b*c", "acb", false),
            ("ab*ba", "aba", false),
            (r"a\*", "a*", true),
            (r"a\*", "ab", false),
            (r"a\\*", r"a\x", true),
            ("*é*", "caféteria", true),
        ] {
            assert_eq!(Wildcard::new(pattern).matches(text), expected, "{pattern} {text}");
        }
        let (pattern, text) = ("*a".repeat(2000), "a".repeat(100_000) + "b");
        assert!(!Wildcard::new(&pattern).matches(&text));
    }
}
