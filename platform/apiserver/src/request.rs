//! The target of a request: its path and its query.

use std::borrow::Cow;

use http::{Method, Uri};
use mayfly_api::validation::{FieldError, FieldErrorKind};

use crate::{
    custom::ServedKinds,
    proxy,
    registry::{Kind, not_supported},
    selection,
    status::ApiError,
};

/// A parsed resource path.
#[derive(Clone, Debug)]
pub(crate) struct RequestTarget {
    pub(crate) kind: &'static Kind,
    /// Empty for cluster-scoped kinds, and for namespaced ones over all namespaces.
    pub(crate) namespace: String,
    pub(crate) name: Option<String>,
    pub(crate) subresource: Option<String>,
    /// Whether the path is of the old form of watches, `/api/v1/watch/…`.
    pub(crate) is_watch: bool,
}

/// Splits a path into decoded segments; `None` when one is not UTF-8 or contains an encoded slash. The segments after
/// the `proxy` of a proxied request belong to the pod's path, and are not decoded.
pub(crate) fn segments(path: &str) -> Option<Vec<String>> {
    let mut segments: Vec<String> = Vec::new();
    for segment in path.split('/').filter(|segment| !segment.is_empty()) {
        let segment = match proxy::is_below(&segments) {
            true => Cow::Borrowed(segment),
            false => percent_decode(segment).filter(|segment| !segment.contains('/'))?,
        };
        segments.push(segment.into_owned());
    }
    Some(segments)
}

fn percent_decode(segment: &str) -> Option<Cow<'_, str>> {
    if !segment.contains('%') {
        return Some(segment.into());
    }
    let (mut bytes, mut rest) = (Vec::with_capacity(segment.len()), segment.as_bytes());
    while let Some((first, after)) = rest.split_first() {
        if *first == b'%' {
            let digits = std::str::from_utf8(after.get(..2)?).ok()?;
            bytes.push(u8::from_str_radix(digits, 16).ok()?);
            rest = &after[2..];
        } else {
            bytes.push(*first);
            rest = after;
        }
    }
    String::from_utf8(bytes).ok().map(Cow::Owned)
}

impl RequestTarget {
    /// Parses `/api/v1/…` and `/apis/<group>/<version>/…` (upstream: `apiserver/pkg/endpoints/request`).
    pub(crate) fn parse(segments: &[String], served: &ServedKinds) -> Result<Self, ApiError> {
        let texts: Vec<&str> = segments.iter().map(String::as_str).collect();
        let (group, version, rest) = match texts.as_slice() {
            ["api", version, rest @ ..] => ("", *version, rest),
            ["apis", group, version, rest @ ..] => (*group, *version, rest),
            _ => return Err(ApiError::no_path()),
        };
        let (is_watch, rest) = match rest {
            ["watch", rest @ ..] if !rest.is_empty() => (true, rest),
            rest => (false, rest),
        };
        let find = |plural: &str| {
            // Upstream's router answers for groups that nothing serves.
            let is_known = || served.kinds().any(|kind| kind.group == group);
            let unknown = || if is_known() { ApiError::no_resource() } else { ApiError::no_path() };
            served.find(group, version, plural).ok_or_else(unknown)
        };
        let (kind, namespace, rest) = match rest {
            // The subresources of a namespace have the form of resources in it.
            ["namespaces", name, sub @ ("status" | "finalize")] if !is_watch => {
                return Ok(Self {
                    kind: find("namespaces")?,
                    namespace: String::new(),
                    name: Some((*name).into()),
                    subresource: Some((*sub).into()),
                    is_watch: false,
                });
            }
            ["namespaces", namespace, plural, rest @ ..] => {
                let kind = find(plural)?;
                if !kind.namespaced {
                    return Err(ApiError::no_resource());
                }
                (kind, (*namespace).to_owned(), rest)
            }
            [plural, rest @ ..] => (find(plural)?, String::new(), rest),
            [] => return Err(ApiError::no_resource()),
        };
        let (name, subresource) = match rest {
            [] => (None, None),
            [name] => (Some((*name).to_owned()), None),
            [name, subresource] => (Some((*name).to_owned()), Some((*subresource).to_owned())),
            // The remaining segments are the pod's path.
            [name, subresource, ..] if proxy::is_proxy(group, kind.plural, rest) => {
                (Some((*name).to_owned()), Some((*subresource).to_owned()))
            }
            _ => return Err(ApiError::no_resource()),
        };
        let is_missing = name.is_some() && kind.namespaced && namespace.is_empty();
        if is_missing || is_watch && subresource.is_some() {
            return Err(ApiError::no_resource());
        }
        Ok(Self { kind, namespace, name, subresource, is_watch })
    }
}

/// The verb of a request as upstream names it (`apiserver/pkg/endpoints/request`), for metrics and refusals.
pub(crate) fn verb(method: &Method, uri: &Uri, target: Option<&RequestTarget>) -> &'static str {
    if *method == Method::GET && target.is_some_and(|target| target.is_watch) {
        return "watch";
    }
    let one = target.is_some_and(|target| target.name.is_some());
    verb_of(method, uri, one, target.is_some())
}

/// The verb of a request about one object, or about a resource as a whole.
fn verb_of(method: &Method, uri: &Uri, one: bool, is_resource: bool) -> &'static str {
    match (method.as_str(), one) {
        // As it is executed: a request about one object is no watch, whatever its query.
        ("GET", false) if is_resource && asks_to_watch(uri) => "watch",
        ("GET" | "HEAD", true) => "get",
        ("GET" | "HEAD", false) if is_resource => "list",
        ("GET" | "HEAD", false) => "get",
        ("POST", _) => "create",
        ("PUT", _) => "update",
        ("PATCH", _) => "patch",
        ("DELETE", true) => "delete",
        ("DELETE", false) => "deletecollection",
        _ => "other",
    }
}

/// Whether [`Query::parse`] finds that the request is a watch.
fn asks_to_watch(uri: &Uri) -> bool {
    parameter(uri, "watch").is_some_and(|value| boolean(&value))
}

/// The name of the only object that a list or watch can contain: rules for named objects permit such a request.
pub(crate) fn selected_name(method: &Method, uri: &Uri) -> Option<String> {
    if !matches!(*method, Method::GET | Method::HEAD) {
        return None;
    }
    selection::selected_name(&parameter(uri, "fieldSelector")?)
}

/// A parameter's value as [`Query::parse`] reads it: the last one.
fn parameter<'u>(uri: &'u Uri, name: &str) -> Option<Cow<'u, str>> {
    let pairs = url::form_urlencoded::parse(uri.query()?.as_bytes());
    pairs.filter(|(key, _)| key == name).last().map(|(_, value)| value)
}

/// The error for a `dryRun` other than `All`.
pub(crate) fn unsupported_dry_run(value: &str) -> FieldError {
    let kind = FieldErrorKind::NotSupported { value: format!("[]string{{{value:?}}}") };
    FieldError { path: "dryRun".into(), kind, detail: "supported values: \"All\"".into() }
}

/// `fieldValidation`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum FieldValidation {
    Ignore,
    #[default]
    Warn,
    Strict,
}

/// The query parameters of the API's verbs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Query {
    pub(crate) resource_version: Option<String>,
    pub(crate) resource_version_match: Option<String>,
    pub(crate) limit: Option<usize>,
    pub(crate) continue_token: Option<String>,
    pub(crate) label_selector: Option<String>,
    pub(crate) field_selector: Option<String>,
    pub(crate) watch: bool,
    pub(crate) allow_watch_bookmarks: bool,
    pub(crate) send_initial_events: Option<bool>,
    pub(crate) timeout_seconds: Option<u64>,
    pub(crate) dry_run: bool,
    pub(crate) field_manager: Option<String>,
    pub(crate) field_validation: FieldValidation,
    pub(crate) force: bool,
    pub(crate) propagation_policy: Option<String>,
    pub(crate) grace_period_seconds: Option<i64>,
    pub(crate) orphan_dependents: Option<bool>,
    pub(crate) include_object: Option<String>,
}

/// Longest name of a field manager, in bytes (upstream's limit).
const FIELD_MANAGER_BYTES_MAX: usize = 128;

impl Query {
    /// Parses the parameters of a request with this method. Errors refer to the method's options.
    pub(crate) fn parse(method: &Method, text: &str) -> Result<Self, ApiError> {
        let options = match method.as_str() {
            "POST" => "CreateOptions",
            "PUT" => "UpdateOptions",
            "PATCH" => "PatchOptions",
            "DELETE" => "DeleteOptions",
            _ => "ListOptions",
        };
        let mut query = Self::default();
        for (key, value) in url::form_urlencoded::parse(text.as_bytes()) {
            query.set(&key, value.into_owned(), options)?;
        }
        Ok(query)
    }

    fn set(&mut self, key: &str, value: String, options: &str) -> Result<(), ApiError> {
        let some = |value: String| Some(value).filter(|value| !value.is_empty());
        match key {
            "resourceVersion" => self.resource_version = some(value),
            "resourceVersionMatch" => self.resource_version_match = some(value),
            "limit" => {
                let limit: i64 = number(key, &value)?;
                self.limit = usize::try_from(limit).ok().filter(|limit| *limit > 0);
            }
            "continue" => self.continue_token = some(value),
            "labelSelector" => self.label_selector = some(value),
            "fieldSelector" => self.field_selector = some(value),
            "watch" => self.watch = boolean(&value),
            "allowWatchBookmarks" => self.allow_watch_bookmarks = boolean(&value),
            "sendInitialEvents" => self.send_initial_events = Some(boolean(&value)),
            "timeoutSeconds" => {
                let seconds: i64 = number(key, &value)?;
                self.timeout_seconds = u64::try_from(seconds).ok();
            }
            "dryRun" => match value.as_str() {
                "All" => self.dry_run = true,
                "" => {}
                other => return Err(ApiError::invalid_options(options, &[unsupported_dry_run(other)])),
            },
            "fieldManager" => {
                if value.len() > FIELD_MANAGER_BYTES_MAX {
                    let detail = format!("may not be more than {FIELD_MANAGER_BYTES_MAX} bytes");
                    let error =
                        FieldError { path: "fieldManager".into(), kind: FieldErrorKind::TooLong, detail };
                    return Err(ApiError::invalid_options(options, &[error]));
                }
                if value.chars().any(char::is_control) {
                    let detail = "should only contain printable characters";
                    let error = FieldError::invalid("fieldManager", format!("{value:?}"), detail);
                    return Err(ApiError::invalid_options(options, &[error]));
                }
                self.field_manager = some(value);
            }
            "fieldValidation" => {
                self.field_validation = match value.as_str() {
                    "Ignore" => FieldValidation::Ignore,
                    "Warn" | "" => FieldValidation::Warn,
                    "Strict" => FieldValidation::Strict,
                    other => {
                        let kind = FieldErrorKind::NotSupported { value: format!("{other:?}") };
                        let detail = "supported values: \"\", \"Ignore\", \"Strict\", \"Warn\"".into();
                        let error = FieldError { path: "fieldValidation".into(), kind, detail };
                        return Err(ApiError::invalid_options(options, &[error]));
                    }
                }
            }
            "force" => self.force = boolean(&value),
            "propagationPolicy" => self.propagation_policy = some(value),
            "gracePeriodSeconds" => self.grace_period_seconds = Some(number(key, &value)?),
            "orphanDependents" => self.orphan_dependents = Some(boolean(&value)),
            "includeObject" => self.include_object = some(value),
            _ => {}
        }
        Ok(())
    }
}

/// Contradictions among the options of a list or a watch (upstream: `apimachinery/pkg/apis/meta/internalversion`,
/// `ValidateListOptions`).
pub(crate) fn check_list_options(query: &Query) -> Result<(), ApiError> {
    const PATH: &str = "resourceVersionMatch";
    let mut errors = Vec::new();
    let rule = query.resource_version_match.as_deref();
    let mut forbid = |detail: &str| errors.push(FieldError::forbidden(PATH, detail));
    if query.watch {
        if query.send_initial_events.is_some() && rule != Some("NotOlderThan") {
            forbid("sendInitialEvents requires setting resourceVersionMatch to NotOlderThan");
        }
        if rule.is_some() && query.send_initial_events.is_none() {
            forbid("resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided");
        }
        if let Some(other) = rule.filter(|rule| *rule != "NotOlderThan") {
            errors.push(not_supported(PATH, other, &["NotOlderThan"]));
        }
    } else if let Some(rule) = rule {
        if query.resource_version.is_none() {
            forbid("resourceVersionMatch is forbidden unless resourceVersion is provided");
        }
        if query.continue_token.is_some() {
            forbid("resourceVersionMatch is forbidden when continue is provided");
        }
        if !matches!(rule, "Exact" | "NotOlderThan") {
            errors.push(not_supported(PATH, rule, &["", "Exact", "NotOlderThan"]));
        } else if rule == "Exact" && query.resource_version.as_deref() == Some("0") {
            let detail = "resourceVersionMatch \"exact\" is forbidden for resourceVersion \"0\"";
            errors.push(FieldError::forbidden(PATH, detail));
        }
    }
    if query.send_initial_events.is_some() && !query.watch {
        errors.push(FieldError::forbidden("sendInitialEvents", "sendInitialEvents is forbidden for list"));
    }
    if errors.is_empty() { Ok(()) } else { Err(ApiError::invalid_options("ListOptions", &errors)) }
}

/// The resource of a path that no served kind has, for error messages.
pub(crate) struct UnknownResource<'a> {
    pub(crate) group: &'a str,
    pub(crate) resource: &'a str,
    pub(crate) namespace: &'a str,
    pub(crate) name: &'a str,
    pub(crate) subresource: &'a str,
}

impl<'a> UnknownResource<'a> {
    /// `None` if the path is not that of a resource.
    pub(crate) fn parse(segments: &'a [String]) -> Option<Self> {
        let texts: Vec<&'a str> = segments.iter().map(String::as_str).collect();
        let (group, rest) = match texts.as_slice() {
            ["api", _, rest @ ..] => ("", rest.to_vec()),
            ["apis", group, _, rest @ ..] => (*group, rest.to_vec()),
            _ => return None,
        };
        let (namespace, rest) = match rest.as_slice() {
            ["namespaces", namespace, rest @ ..] if !rest.is_empty() => (*namespace, rest.to_vec()),
            _ => ("", rest),
        };
        let at = |index: usize| rest.get(index).copied().unwrap_or("");
        let unknown = Self { group, resource: at(0), namespace, name: at(1), subresource: at(2) };
        (!unknown.resource.is_empty()).then_some(unknown)
    }

    pub(crate) fn verb(&self, method: &Method, uri: &Uri) -> &'static str {
        verb_of(method, uri, !self.name.is_empty(), true)
    }
}

/// The value of a numeric parameter. Errors have the words of Go's `strconv`, as upstream's.
fn number<T: std::str::FromStr>(key: &str, value: &str) -> Result<T, ApiError> {
    use std::num::IntErrorKind::{NegOverflow, PosOverflow};
    value.parse().map_err(|_| {
        let why = match value.parse::<i64>().map_err(|error| *error.kind()) {
            Ok(_) => return ApiError::bad_request(format!("{key}: {value} is out of range")),
            Err(PosOverflow | NegOverflow) => "value out of range",
            Err(_) => "invalid syntax",
        };
        ApiError::bad_request(format!("strconv.ParseInt: parsing {value:?}: {why}"))
    })
}

/// The value of a boolean parameter that is present: every text but two is true, also the empty one (`?watch`).
/// (Upstream: `apimachinery/pkg/runtime`, `Convert_Slice_string_To_bool`.)
pub(crate) fn boolean(value: &str) -> bool {
    !(value == "0" || value.eq_ignore_ascii_case("false"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths() {
        let parse = |path: &str| {
            RequestTarget::parse(&segments(path).unwrap(), &ServedKinds::default()).ok().map(|t| {
                (t.kind.plural, t.namespace, t.name.unwrap_or_default(), t.subresource.unwrap_or_default())
            })
        };
        let target =
            |plural, ns: &str, name: &str, sub: &str| Some((plural, ns.into(), name.into(), sub.into()));
        for (path, expected) in [
            ("/api/v1/pods", target("pods", "", "", "")),
            ("/api/v1/namespaces/a/pods", target("pods", "a", "", "")),
            ("/api/v1/namespaces/a/pods/p/log", target("pods", "a", "p", "log")),
            ("/api/v1/namespaces/a", target("namespaces", "", "a", "")),
            ("/api/v1/namespaces/a/finalize", target("namespaces", "", "a", "finalize")),
            ("/api/v1/nodes/n/status", target("nodes", "", "n", "status")),
            ("/apis/mayfly.dev/v1/functions", target("functions", "", "", "")),
            ("/apis/mayfly.dev/v1/namespaces/d/functions/a%2Db", target("functions", "d", "a-b", "")),
            ("/api/v1/namespaces/a/nodes", None),
            ("/api/v1/pods/p", None),
            ("/api/v2/pods", None),
            ("/api/v1", None),
        ] {
            assert_eq!(parse(path), expected, "{path}");
        }
        assert_eq!(segments("/a%2fb"), None);
        assert_eq!(segments("/a%zz"), None);
    }

    #[test]
    fn verbs_are_those_of_the_execution() {
        let (list, one) = ("/api/v1/namespaces/a/pods", "/api/v1/namespaces/a/pods/p");
        for (path, query, expected) in [
            (list, "", "list"),
            (list, "watch", "watch"),
            (list, "watch=1", "watch"),
            (list, "watch=yes", "watch"),
            (list, "%77atch=true", "watch"),
            (list, "watch=true&watch=0", "list"),
            (list, "watch=0&labelSelector=rewatch=true", "list"),
            (list, "xwatch=true", "list"),
            (one, "watch=true", "get"),
            ("/api/v1/namespaces/a/pods/p/proxy/", "watch=true", "get"),
        ] {
            let target = RequestTarget::parse(&segments(path).unwrap(), &ServedKinds::default()).unwrap();
            let uri: Uri = format!("{path}?{query}").parse().unwrap();
            assert_eq!(verb(&Method::GET, &uri, Some(&target)), expected, "{uri}");
            let is_watch = Query::parse(&Method::GET, query).unwrap().watch && target.name.is_none();
            assert_eq!(is_watch, expected == "watch", "{uri}");
        }
    }

    #[test]
    fn queries() {
        let query = Query::parse(
            &Method::GET,
            "limit=5&watch=1&labelSelector=a%3Db&dryRun=All&fieldValidation=Strict",
        )
        .unwrap();
        assert_eq!((query.limit, query.watch, query.dry_run), (Some(5), true, true));
        assert_eq!(query.label_selector.as_deref(), Some("a=b"));
        assert_eq!(query.field_validation, FieldValidation::Strict);
        for (text, watch) in
            [("watch", true), ("watch=yes", true), ("watch=0", false), ("watch=FALSE", false), ("", false)]
        {
            assert_eq!(Query::parse(&Method::GET, text).unwrap().watch, watch, "{text}");
        }
        for bad in ["limit=x", "dryRun=Some", "fieldValidation=Loose"] {
            assert!(Query::parse(&Method::GET, bad).is_err(), "{bad}");
        }
    }
}
