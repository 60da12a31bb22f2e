//! Sticky sessions: a cookie binds a client to one revision.
//!
//! A client without the cookie chosen by the function's author gets one that identifies the target. If the function
//! sets a cookie of that name itself, its value is kept, and a second cookie identifies the target: otherwise the hash
//! of the value would select the target, not the revision that set it.

use std::sync::Arc;

use http::{HeaderMap, HeaderValue, header};

/// Identifies a visitor's target if the function sets the chosen cookie itself.
const COOKIE_REVISION: &str = "mayfly-revision";

/// A function's cookie and its possible values.
pub(super) struct ByCookie {
    name: String,
    targets: Vec<Target>,
}

struct Target {
    identity: String,
    /// For all paths below the function's prefix.
    under_path: Arc<Cookies>,
    under_host: Arc<Cookies>,
}

/// The `set-cookie` values for one target.
struct Cookies {
    /// The cookie that the function's author chose.
    chosen: HeaderValue,
    /// The second cookie.
    second: HeaderValue,
}

/// The visitor's state, from the cookies of a request.
pub(super) enum Visitor<'a> {
    /// A cookie identifies this target.
    Of(usize),
    /// A cookie of the chosen name, with a value that the gateway did not set.
    With(&'a str),
    New,
}

/// The cookie to set with a response.
pub(crate) struct SetCookie {
    cookies: Arc<Cookies>,
    /// Whether the visitor has the chosen cookie: nothing is set unless the function changes it.
    has_chosen: bool,
}

impl ByCookie {
    /// `identities`: of all targets. `prefix`: the function's path. `None` if they are not valid header values.
    pub(super) fn new<'a>(
        name: &str,
        identities: impl Iterator<Item = &'a str>,
        prefix: &str,
    ) -> Option<Self> {
        let targets = identities.map(|identity| {
            let cookies = |path: &str| {
                let set = |name: &str| {
                    let text = format!("{name}={identity}; Path={path}; HttpOnly; SameSite=Lax");
                    HeaderValue::try_from(text).ok()
                };
                Some(Arc::new(Cookies { chosen: set(name)?, second: set(COOKIE_REVISION)? }))
            };
            Some(Target {
                identity: identity.to_owned(),
                under_path: cookies(prefix)?,
                under_host: cookies("/")?,
            })
        });
        Some(Self { targets: targets.collect::<Option<_>>()?, name: name.to_owned() })
    }

    /// `serves`: whether a target still has a share.
    pub(super) fn visitor<'a>(&self, headers: &'a HeaderMap, serves: impl Fn(usize) -> bool) -> Visitor<'a> {
        let named = |value: &str| self.targets.iter().position(|target| target.identity == value);
        let target = |value: &str| named(value).filter(|target| serves(*target));
        let chosen = cookie(headers, &self.name);
        let second = cookie(headers, COOKIE_REVISION);
        match (second.and_then(target).or_else(|| chosen.and_then(target)), chosen) {
            (Some(target), _) => Visitor::Of(target),
            (None, Some(value)) if !value.is_empty() && named(value).is_none() => Visitor::With(value),
            (None, _) => Visitor::New,
        }
    }

    /// `by_host`: cookies apply to all paths.
    pub(super) fn set(&self, target: usize, by_host: bool, has_chosen: bool) -> SetCookie {
        let target = &self.targets[target];
        let cookies = if by_host { &target.under_host } else { &target.under_path };
        SetCookie { cookies: cookies.clone(), has_chosen }
    }
}

impl SetCookie {
    /// The cookie to add to those of the function's response.
    pub(crate) fn beside(&self, answer: &HeaderMap) -> Option<HeaderValue> {
        let Cookies { chosen, second } = &*self.cookies;
        let mut set = answer.get_all(header::SET_COOKIE).iter();
        if set.any(|theirs| name_of(theirs) == name_of(chosen)) {
            return Some(second.clone());
        }
        (!self.has_chosen).then(|| chosen.clone())
    }
}

fn name_of(set_cookie: &HeaderValue) -> Option<&[u8]> {
    let bytes = set_cookie.as_bytes();
    let end = bytes.iter().position(|byte| *byte == b'=')?;
    Some(bytes[..end].trim_ascii())
}

/// The value of a cookie in a request.
fn cookie<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let lines = headers.get_all(header::COOKIE).into_iter().filter_map(|line| line.to_str().ok());
    lines.flat_map(|line| line.split(';')).find_map(|pair| {
        let (found, value) = pair.trim().split_once('=')?;
        (found == name).then_some(value)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cookie_of_the_functions_own_is_left_alone() {
        let by = ByCookie::new("session", ["r0", "r1"].into_iter(), "/fn/ns/hello").unwrap();
        let said = |has_chosen: bool, answer: &HeaderMap| {
            let cookie = by.set(1, false, has_chosen).beside(answer)?;
            Some(cookie.to_str().unwrap().split(';').next().unwrap().to_owned())
        };
        for (theirs, own) in [("session=abc; Path=/", true), ("session2=abc", false), ("a=session=x", false)]
        {
            let answer = HeaderMap::from_iter([(header::SET_COOKIE, HeaderValue::from_static(theirs))]);
            let expected = if own { "mayfly-revision=r1" } else { "session=r1" };
            assert_eq!(said(false, &answer).as_deref(), Some(expected), "{theirs}");
            let expected = own.then_some("mayfly-revision=r1");
            assert_eq!(said(true, &answer).as_deref(), expected, "{theirs}");
        }
        assert_eq!(said(true, &HeaderMap::new()), None);
    }
}
