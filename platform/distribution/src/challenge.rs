//! `WWW-Authenticate` (RFC 9110, section 11.6.1): the authentication that a registry demands. Pure.

/// The authentication that a registry requires.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Challenge {
    Basic,
    /// A token of another server (distribution's token authentication).
    Bearer {
        realm: String,
        service: Option<String>,
        scope: Option<String>,
    },
}

/// The strongest challenge that this client can answer: a token before a password.
pub(crate) fn parse<'a>(headers: impl Iterator<Item = &'a str>) -> Option<Challenge> {
    let mut basic = None;
    for header in headers {
        for (scheme, parameters) in challenges(header) {
            let parameter = |name: &str| {
                let found = parameters.iter().find(|(known, _)| known.eq_ignore_ascii_case(name));
                found.map(|(_, value)| value.clone())
            };
            if scheme.eq_ignore_ascii_case("bearer") {
                let Some(realm) = parameter("realm") else { continue };
                return Some(Challenge::Bearer {
                    realm,
                    service: parameter("service"),
                    scope: parameter("scope"),
                });
            }
            if scheme.eq_ignore_ascii_case("basic") {
                basic = Some(Challenge::Basic);
            }
        }
    }
    basic
}

/// Splits one header, which may carry several challenges: `scheme name=value, name="value", scheme …`.
fn challenges(header: &str) -> Vec<(String, Vec<(String, String)>)> {
    let mut found: Vec<(String, Vec<(String, String)>)> = Vec::new();
    let mut rest = header.trim_start_matches([' ', ',']);
    while !rest.is_empty() {
        let end = rest.find([' ', '=', ',']).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        if let Some(value) = after.strip_prefix('=') {
            let (value, after) = value_of(value);
            if let Some((_, parameters)) = found.last_mut() {
                parameters.push((word.to_owned(), value));
            }
            rest = after;
        } else {
            if word.is_empty() {
                break;
            }
            found.push((word.to_owned(), Vec::new()));
            rest = after;
        }
        rest = rest.trim_start_matches([' ', ',']);
    }
    found
}

/// A token or a quoted string, and what follows it.
fn value_of(text: &str) -> (String, &str) {
    let Some(quoted) = text.strip_prefix('"') else {
        let end = text.find([' ', ',']).unwrap_or(text.len());
        return (text[..end].to_owned(), &text[end..]);
    };
    let mut value = String::new();
    let mut characters = quoted.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return (value, &quoted[at + 1..]),
            '\\' => value.extend(characters.next().map(|(_, escaped)| escaped)),
            other => value.push(other),
        }
    }
    (value, "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn challenges_of_registries() {
        let bearer = |realm: &str, service: Option<&str>, scope: Option<&str>| {
            let owned = |text: &str| text.to_owned();
            Some(Challenge::Bearer {
                realm: realm.into(),
                service: service.map(owned),
                scope: scope.map(owned),
            })
        };
        for (headers, expected) in [
            (
                vec![r#"Bearer realm="https://a/token",service="r",scope="repository:a:pull,push""#],
                bearer("https://a/token", Some("r"), Some("repository:a:pull,push")),
            ),
            (vec![r#"bearer realm=https://a"#], bearer("https://a", None, None)),
            (vec![r#"Basic realm="Registry Realm""#], Some(Challenge::Basic)),
            (vec!["Basic"], Some(Challenge::Basic)),
            (vec![r#"Basic realm="x", Bearer realm="https://a""#], bearer("https://a", None, None)),
            (vec!["Basic realm=x", r#"Bearer realm="q\"u""#], bearer("q\"u", None, None)),
            (vec!["Bearer service=x"], None),
            (vec!["Negotiate", ""], None),
            (vec!["=", "\"", "Bearer realm=\"unclosed"], bearer("unclosed", None, None)),
        ] {
            assert_eq!(parse(headers.iter().copied()), expected, "{headers:?}");
        }
    }
}
