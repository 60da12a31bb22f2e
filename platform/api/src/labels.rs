//! Keys and values of labels. Rules and wording are upstream's (`apimachinery/pkg/util/validation`).

use crate::names::dns_subdomain;

/// Longest name part of a key, and longest value, in bytes.
const PART_BYTES_MAX: usize = 63;
const NAME_PART_FORM: &str = "must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an \
                              alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for \
                              validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')";

/// The errors about a key, `name` or `prefix/name` (upstream's `IsQualifiedName`); none if it is valid. An empty name
/// part has two.
pub fn qualified_name_errors(text: &str) -> Vec<String> {
    let (prefix, name) = match text.split('/').collect::<Vec<_>>().as_slice() {
        [name] => (None, *name),
        [prefix, name] => (Some(*prefix), *name),
        _ => {
            return vec![format!(
                "a qualified name {NAME_PART_FORM} with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')"
            )];
        }
    };
    if prefix == Some("") {
        return vec!["prefix part must be non-empty".into()];
    }
    if let Some(Err(why)) = prefix.map(dns_subdomain) {
        return vec![format!("prefix part {why}")];
    }
    match name {
        "" => vec!["name part must be non-empty".into(), format!("name part {NAME_PART_FORM}")],
        _ if name.len() > PART_BYTES_MAX => {
            vec![format!("name part must be no more than {PART_BYTES_MAX} characters")]
        }
        _ if is_name_part(name) => Vec::new(),
        _ => vec![format!("name part {NAME_PART_FORM}")],
    }
}

/// Checks a key. The error is the first of [`qualified_name_errors`].
pub fn qualified_name(text: &str) -> Result<(), String> {
    qualified_name_errors(text).into_iter().next().map_or(Ok(()), Err)
}

/// Checks a value (upstream's `IsValidLabelValue`).
pub fn label_value(text: &str) -> Result<(), String> {
    if text.len() > PART_BYTES_MAX {
        return Err(format!("must be no more than {PART_BYTES_MAX} characters"));
    }
    if is_name_part(text) {
        return Ok(());
    }
    Err("a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must \
         start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used \
         for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"
        .into())
}

/// Whether a text has only `[-_.A-Za-z0-9]`, alphanumeric at both ends; it may be empty.
fn is_name_part(text: &str) -> bool {
    let ends = [text.bytes().next(), text.bytes().last()];
    text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
        && ends.iter().flatten().all(u8::is_ascii_alphanumeric)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qualified_names() {
        for good in ["a", "A_b.c-d", "mayfly.dev/function", "kubernetes.io/metadata.name"] {
            assert_eq!(qualified_name(good), Ok(()), "{good}");
        }
        for bad in ["", "/a", "a/", "a/b/c", "-a", "a_", "A.com/x", "a b"] {
            assert!(qualified_name(bad).is_err(), "{bad}");
        }
    }
}
