//! Patterns of paths in `spin.toml`: `*` and `?` within a name, `**` for any folders.

use std::path::Path;

/// A pattern, split into the names of its folders and of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Glob(Vec<GlobPart>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum GlobPart {
    /// `**`: none, one or many folders.
    Folders,
    /// A name, with or without wildcards.
    Name(Vec<char>),
}

impl Glob {
    pub(super) fn parse(pattern: &str) -> anyhow::Result<Self> {
        if pattern.contains(['[', ']', '{', '}']) {
            anyhow::bail!("the supported wildcards are *, ? and **");
        }
        let parts = pattern.split('/').filter(|part| !part.is_empty() && *part != ".");
        let part = |part: &str| match part {
            "**" => Ok(GlobPart::Folders),
            part if part.contains("**") => anyhow::bail!("** must stand between slashes"),
            part => Ok(GlobPart::Name(part.chars().collect())),
        };
        parts.map(part).collect::<anyhow::Result<_>>().map(Self)
    }

    /// Whether a relative path matches as a whole.
    pub(super) fn matches(&self, path: &Path) -> bool {
        let names: Vec<Vec<char>> =
            path.components().map(|part| part.as_os_str().to_string_lossy().chars().collect()).collect();
        sequence_matches(
            &self.0,
            &names,
            |part| *part == GlobPart::Folders,
            |part, name| match part {
                GlobPart::Folders => true,
                GlobPart::Name(pattern) => sequence_matches(
                    pattern,
                    name,
                    |wildcard| *wildcard == '*',
                    |wildcard, letter| *wildcard == '?' || wildcard == letter,
                ),
            },
        )
    }
}

/// Whether a sequence matches a pattern with elements that stand for any number of the sequence's elements. Runs in the
/// product of both lengths: only the last such element is backtracked.
fn sequence_matches<P, T>(
    pattern: &[P],
    sequence: &[T],
    is_any: impl Fn(&P) -> bool,
    matches: impl Fn(&P, &T) -> bool,
) -> bool {
    let (mut at_pattern, mut at) = (0, 0);
    let mut again = None;
    while at < sequence.len() {
        match pattern.get(at_pattern) {
            Some(part) if is_any(part) => {
                again = Some((at_pattern, at));
                at_pattern += 1;
            }
            Some(part) if matches(part, &sequence[at]) => {
                at_pattern += 1;
                at += 1;
            }
            _ => {
                let Some((any, from)) = again else { return false };
                again = Some((any, from + 1));
                at_pattern = any + 1;
                at = from + 1;
            }
        }
    }
    pattern[at_pattern..].iter().all(is_any)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_whole_paths() {
        for (pattern, path, expected) in [
            ("a/*.html", "a/x.html", true),
            ("a/*.html", "a/b/x.html", false),
            ("a/*.html", "a/x.htm", false),
            ("./a/**/*.html", "a/x.html", true),
            ("a/**/*.html", "a/b/c/x.html", true),
            ("a/**/c/*", "a/b/c/d/c/x", true),
            ("**/*", "x", true),
            ("**", "a/b", true),
            ("a/**", "a/b/c", true),
            ("a/**", "b/c", false),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("*a*b*", "xaybz", true),
            ("*a*b*", "xbya", false),
            ("notes.txt", "notes.txt", true),
            ("notes.txt", "a/notes.txt", false),
            ("\u{fc}*", "\u{fc}ber", true),
        ] {
            assert_eq!(Glob::parse(pattern).unwrap().matches(Path::new(path)), expected, "{pattern} {path}");
        }
        for bad in ["a[b]", "{a,b}", "a**b"] {
            assert!(Glob::parse(bad).is_err(), "{bad}");
        }
    }
}
