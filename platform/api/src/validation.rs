//! The validation of Functions. Errors carry the path of the field, as Kubernetes' `field.Error` does.

use std::{collections::HashSet, time::Duration};

use crate::{
    duration::Span,
    egress::EgressRule,
    function::{FunctionSpec, Limits, Scaling, Source, TrafficTarget},
    invocation::AsyncInvocation,
    names, quantity,
};

/// Largest memory limit of one instance, in bytes: a 32-bit linear memory.
pub const MEMORY_BYTES_MAX: u64 = 4 << 30;
/// Smallest memory limit of one instance, in bytes: one wasm page.
pub const MEMORY_BYTES_MIN: u64 = 64 << 10;
/// Maximum rate of one function's log, in bytes per second.
pub const LOG_RATE_MAX: u64 = 1 << 30;
/// Maximum number of replicas of one revision in total.
pub const REPLICAS_MAX: u32 = 10_000;
/// Maximum number of concurrent requests of one replica.
pub const CONCURRENCY_MAX: u32 = 100_000;
/// Longest time for one request: a day. What takes longer is a Job or a workflow.
pub const TIMEOUT_MAX: Duration = Duration::from_secs(24 * 3600);
/// Bytes of a function's name: with a revision's number behind it (`-` and up to ten digits) it still is a label's
/// value.
pub const FUNCTION_NAME_BYTES_MAX: usize = names::LABEL_BYTES_MAX - 11;

/// Checks the name of a new function.
pub fn function_name(name: &str) -> Result<(), String> {
    names::dns_label(name)?;
    if name.len() > FUNCTION_NAME_BYTES_MAX {
        return Err(format!(
            "must be no more than {FUNCTION_NAME_BYTES_MAX} bytes: its revisions have its name and a number"
        ));
    }
    Ok(())
}

/// An error in one field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldError {
    /// `spec.source.component`
    pub path: String,
    pub kind: FieldErrorKind,
    pub detail: String,
}

/// The kinds of `field.Error` in use; `cause` is the word in a Status's causes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FieldErrorKind {
    Required,
    Invalid {
        value: String,
    },
    Forbidden,
    Duplicate {
        value: String,
    },
    NotSupported {
        value: String,
    },
    /// A reference to a part of the object that does not exist.
    NotFound {
        value: String,
    },
    /// Refused for its length alone, so that it is not shown.
    TooLong,
    /// A list with too many items.
    TooMany {
        count: u64,
    },
    /// A value of another type than the schema's.
    TypeInvalid {
        value: String,
    },
}

impl FieldError {
    pub fn required(path: impl Into<String>, detail: impl Into<String>) -> Self {
        Self { path: path.into(), kind: FieldErrorKind::Required, detail: detail.into() }
    }

    /// `value` is shown to the user: quote strings.
    pub fn invalid(path: impl Into<String>, value: impl ToString, detail: impl Into<String>) -> Self {
        let kind = FieldErrorKind::Invalid { value: value.to_string() };
        Self { path: path.into(), kind, detail: detail.into() }
    }

    /// A value of the type `found` in a field of the type `expected`, both in the terms of OpenAPI.
    pub fn type_invalid(path: impl Into<String>, expected: &str, found: &str) -> Self {
        let path = path.into();
        let detail = format!("{path} in body must be of type {expected}: {found:?}");
        Self { path, kind: FieldErrorKind::TypeInvalid { value: format!("{found:?}") }, detail }
    }

    pub fn too_long(path: impl Into<String>, bytes_max: usize) -> Self {
        let detail = format!("may not be more than {bytes_max} bytes");
        Self { path: path.into(), kind: FieldErrorKind::TooLong, detail }
    }

    pub fn forbidden(path: impl Into<String>, detail: impl Into<String>) -> Self {
        Self { path: path.into(), kind: FieldErrorKind::Forbidden, detail: detail.into() }
    }

    /// The reason in a Status's causes, such as `FieldValueInvalid`.
    pub fn cause(&self) -> &'static str {
        match self.kind {
            FieldErrorKind::Required => "FieldValueRequired",
            FieldErrorKind::Invalid { .. } => "FieldValueInvalid",
            FieldErrorKind::Forbidden => "FieldValueForbidden",
            FieldErrorKind::Duplicate { .. } => "FieldValueDuplicate",
            FieldErrorKind::NotSupported { .. } => "FieldValueNotSupported",
            FieldErrorKind::NotFound { .. } => "FieldValueNotFound",
            FieldErrorKind::TooLong => "FieldValueTooLong",
            FieldErrorKind::TooMany { .. } => "FieldValueTooMany",
            FieldErrorKind::TypeInvalid { .. } => "FieldValueTypeInvalid",
        }
    }

    /// The message without the path: `Invalid value: "x": must be …`.
    pub fn message(&self) -> String {
        let detail = &self.detail;
        let what = match &self.kind {
            FieldErrorKind::Required => "Required value".to_owned(),
            // An empty text stands for a value that upstream does not show; texts are shown in quotes.
            FieldErrorKind::Invalid { value } if value.is_empty() => "Invalid value".to_owned(),
            FieldErrorKind::Invalid { value } | FieldErrorKind::TypeInvalid { value } => {
                format!("Invalid value: {value}")
            }
            FieldErrorKind::TooMany { count } => format!("Too many: {count}"),
            FieldErrorKind::Forbidden => "Forbidden".to_owned(),
            FieldErrorKind::Duplicate { value } => format!("Duplicate value: {value}"),
            FieldErrorKind::NotSupported { value } => format!("Unsupported value: {value}"),
            FieldErrorKind::NotFound { value } => format!("Not found: {value}"),
            FieldErrorKind::TooLong => "Too long".to_owned(),
        };
        if detail.is_empty() { what } else { format!("{what}: {detail}") }
    }
}

/// Validates a function, and returns all errors. `name` becomes a host label.
pub fn function(name: &str, spec: &FunctionSpec) -> Vec<FieldError> {
    let mut errors = Vec::new();
    if let Err(why) = names::dns_label(name) {
        errors.push(FieldError::invalid("metadata.name", format!("{name:?}"), why));
    }
    source(&spec.source, &mut errors);
    if spec.files.is_some() && spec.source.image.is_some() {
        let detail = "an image carries its files itself";
        errors.push(FieldError::forbidden("spec.files", detail));
    }
    limits(&spec.limits, &mut errors);
    scaling(&spec.scaling, &mut errors);
    for (at, rule) in spec.egress.iter().enumerate() {
        if let Err(why) = rule.parse::<EgressRule>() {
            errors.push(FieldError::invalid(
                format!("spec.egress[{at}]"),
                format!("{rule:?}"),
                why.to_string(),
            ));
        }
    }
    for (at, variable) in spec.env.iter().enumerate() {
        let path = format!("spec.env[{at}]");
        if variable.name.is_empty() || variable.name.contains(['=', '\0']) {
            let detail = "a variable's name is not empty and has no '=' in it";
            errors.push(FieldError::invalid(format!("{path}.name"), format!("{:?}", variable.name), detail));
        }
        if variable.value.as_ref().is_some_and(|v| !v.is_empty()) && variable.value_from.is_some() {
            let detail = "may not be specified when `value` is not empty";
            errors.push(FieldError::invalid(format!("{path}.valueFrom"), "\"\"", detail));
        }
        let from = variable.value_from.as_ref();
        let pods_own = [
            ("fieldRef", from.is_some_and(|from| from.field_ref.is_some())),
            ("resourceFieldRef", from.is_some_and(|from| from.resource_field_ref.is_some())),
        ];
        for (field, _) in pods_own.into_iter().filter(|(_, set)| *set) {
            let detail = "a function runs in no pod of its own: use value, configMapKeyRef or secretKeyRef";
            errors.push(FieldError::forbidden(format!("{path}.valueFrom.{field}"), detail));
        }
    }
    traffic(&spec.traffic, &mut errors);
    if let Some(sticky) = &spec.sticky {
        if sticky.header.is_some() == sticky.cookie.is_some() {
            errors.push(FieldError::invalid("spec.sticky", "{}", "set exactly one of header and cookie"));
        }
        for (field, value) in [("header", &sticky.header), ("cookie", &sticky.cookie)] {
            if value.as_ref().is_some_and(|v| !is_token(v)) {
                let path = format!("spec.sticky.{field}");
                errors.push(FieldError::invalid(path, format!("{value:?}"), "must be an HTTP token"));
            }
        }
    }
    if let Some(rules) = &spec.async_invocation {
        async_invocation(rules, &mut errors);
    }
    errors
}

fn async_invocation(rules: &AsyncInvocation, errors: &mut Vec<FieldError>) {
    const PATH: &str = "spec.asyncInvocation";
    let mut check = |field: &str, holds: bool, value: String, detail: String| {
        if !holds {
            errors.push(FieldError::invalid(format!("{PATH}.{field}"), value, detail));
        }
    };
    let attempts = rules.maximum_retry_attempts;
    let most = AsyncInvocation::RETRY_ATTEMPTS_MAX;
    check("maximumRetryAttempts", attempts <= most, attempts.to_string(), format!("must be at most {most}"));
    let second = Span::from_secs(1);
    for (field, value, most) in [
        ("retryDelay", rules.retry_delay, AsyncInvocation::RETRY_DELAY_MAX),
        ("maximumEventAge", rules.maximum_event_age, AsyncInvocation::EVENT_AGE_MAX),
    ] {
        let detail = format!("must be between {second} and {most}");
        check(field, (second..=most).contains(&value), format!("\"{value}\""), detail);
    }
    let Some(to) = &rules.on_failure else { return };
    let set = [to.function.is_some(), to.workflow.is_some(), to.url.is_some()];
    let is_one = set.iter().filter(|set| **set).count() == 1;
    check("onFailure", is_one, "{}".into(), "set exactly one of function, workflow and url".into());
    if let Some(url) = &to.url {
        let rest = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://"));
        let valid = rest.is_some_and(|rest| {
            !rest.is_empty() && !rest.starts_with('/') && rest.bytes().all(|b| b.is_ascii_graphic())
        });
        check("onFailure.url", valid, format!("{url:?}"), "must be an absolute http or https URL".into());
    }
}

fn source(source: &Source, errors: &mut Vec<FieldError>) {
    let set = [source.component.is_some(), source.oci.is_some(), source.image.is_some()];
    match set.iter().filter(|set| **set).count() {
        0 => errors.push(FieldError::required("spec.source", "set one of component, oci and image")),
        1 => {}
        _ => errors.push(FieldError::forbidden("spec.source", "set only one of component, oci and image")),
    }
    if source.port.is_some() && source.image.is_none() {
        errors.push(FieldError::forbidden("spec.source.port", "a port belongs to an image"));
    }
    for (field, list) in [("command", &source.command), ("args", &source.args)] {
        let path = format!("spec.source.{field}");
        if !list.is_empty() && source.image.is_none() {
            errors.push(FieldError::forbidden(path, "a program and its arguments belong to an image"));
        } else if let Some(at) = list.iter().position(|argument| argument.contains('\0')) {
            let shown = format!("{:?}", list[at]);
            errors.push(FieldError::invalid(format!("{path}[{at}]"), shown, "must not contain a NUL byte"));
        }
    }
    if source.port == Some(0) {
        errors.push(FieldError::invalid("spec.source.port", 0, "must be between 1 and 65535, inclusive"));
    }
}

fn limits(limits: &Limits, errors: &mut Vec<FieldError>) {
    let quantities = [
        ("memory", Some(&limits.memory), MEMORY_BYTES_MIN, MEMORY_BYTES_MAX),
        ("response", Some(&limits.response), 1, u64::MAX),
        ("logRate", limits.log_rate.as_ref(), 1, LOG_RATE_MAX),
    ];
    for (field, value, min, max) in quantities {
        let Some(value) = value else { continue };
        let path = format!("spec.limits.{field}");
        let shown = format!("{:?}", value.0);
        match quantity::whole(value) {
            Err(why) => errors.push(FieldError::invalid(path, shown, why.to_string())),
            Ok(bytes) if bytes < min || bytes > max => {
                errors.push(FieldError::invalid(
                    path,
                    shown,
                    format!("must be between {min} and {max} bytes"),
                ));
            }
            Ok(_) => {}
        }
    }
    if limits.timeout.0.is_zero() {
        errors.push(FieldError::invalid("spec.limits.timeout", "\"0s\"", "must be longer than nothing"));
    }
    if limits.timeout.0 > TIMEOUT_MAX {
        let shown = format!("\"{}\"", limits.timeout);
        errors.push(FieldError::invalid("spec.limits.timeout", shown, "must be 24h or less"));
    }
    if limits.concurrency == 0 || limits.concurrency > CONCURRENCY_MAX {
        let detail = format!("must be between 1 and {CONCURRENCY_MAX}, inclusive");
        errors.push(FieldError::invalid("spec.limits.concurrency", limits.concurrency, detail));
    }
}

fn scaling(scaling: &Scaling, errors: &mut Vec<FieldError>) {
    if scaling.max == 0 || scaling.max > REPLICAS_MAX {
        let detail = format!("must be between 1 and {REPLICAS_MAX}, inclusive");
        errors.push(FieldError::invalid("spec.scaling.max", scaling.max, detail));
    }
    if scaling.min > scaling.max {
        errors.push(FieldError::invalid("spec.scaling.min", scaling.min, "must not be more than max"));
    }
    if scaling.target == 0 {
        errors.push(FieldError::invalid("spec.scaling.target", 0, "must be at least 1"));
    }
    if scaling.window.0.as_secs() < 6 || scaling.window.0.as_secs() > 3600 {
        let shown = format!("\"{}\"", scaling.window);
        errors.push(FieldError::invalid("spec.scaling.window", shown, "must be between 6s and 1h"));
    }
    if !(1..=100).contains(&scaling.panic_window_percent) {
        let detail = "must be between 1 and 100, inclusive";
        errors.push(FieldError::invalid(
            "spec.scaling.panicWindowPercent",
            scaling.panic_window_percent,
            detail,
        ));
    }
    if !(110..=1000).contains(&scaling.panic_threshold_percent) {
        let path = "spec.scaling.panicThresholdPercent";
        let detail = "must be between 110 and 1000, inclusive";
        errors.push(FieldError::invalid(path, scaling.panic_threshold_percent, detail));
    }
}

fn traffic(targets: &[TrafficTarget], errors: &mut Vec<FieldError>) {
    let mut tags = HashSet::new();
    let mut total = 0u64;
    for (at, target) in targets.iter().enumerate() {
        let path = format!("spec.traffic[{at}]");
        if target.revision.is_some() == target.latest.unwrap_or(false) {
            errors.push(FieldError::invalid(&path, "{}", "set exactly one of revision and latest: true"));
        }
        total += u64::from(target.percent.unwrap_or(0));
        if let Some(tag) = &target.tag {
            if let Err(why) = names::dns_label(tag) {
                errors.push(FieldError::invalid(format!("{path}.tag"), format!("{tag:?}"), why));
            }
            if !tags.insert(tag) {
                let kind = FieldErrorKind::Duplicate { value: format!("{tag:?}") };
                errors.push(FieldError { path: format!("{path}.tag"), kind, detail: String::new() });
            }
        }
        if target.tag.is_none() && target.percent.is_none() {
            errors.push(FieldError::required(
                format!("{path}.percent"),
                "a target has a percent, a tag, or both",
            ));
        }
    }
    if !targets.is_empty() && total != 100 {
        errors.push(FieldError::invalid(
            "spec.traffic",
            total,
            "the percents of all targets must be 100 together",
        ));
    }
}

fn is_token(text: &str) -> bool {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
    !text.is_empty() && text.bytes().all(allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errors(yaml: serde_json::Value) -> Vec<String> {
        let spec: FunctionSpec = serde_json::from_value(yaml).unwrap();
        function("hello", &spec).iter().map(|e| format!("{}: {}", e.path, e.message())).collect()
    }

    #[test]
    fn a_small_function_is_valid() {
        let digest = crate::Digest::of(b"x").to_string();
        assert_eq!(errors(serde_json::json!({"source": {"component": digest}})), Vec::<String>::new());
    }

    #[test]
    fn all_problems_are_named_at_once() {
        let found = errors(serde_json::json!({
            "source": {"oci": "a", "image": "b"},
            "limits": {"memory": "1Ti", "timeout": "0s", "concurrency": 0, "logRate": "0"},
            "scaling": {"min": 3, "max": 2, "target": 0},
            "egress": ["example.com"],
            "env": [{"name": "A=B"}, {"name": "N", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
            "traffic": [{"latest": true, "percent": 50, "tag": "t"}, {"revision": "r", "percent": 40, "tag": "t"}],
            "sticky": {"header": "a b"},
            "asyncInvocation": {"maximumRetryAttempts": 101, "retryDelay": "500ms", "maximumEventAge": "169h",
                "onFailure": {"function": "f", "url": "ftp://h"}}
        }));
        for path in [
            "spec.source: Forbidden",
            "spec.limits.memory: Invalid value: \"1Ti\"",
            "spec.limits.timeout",
            "spec.limits.concurrency",
            "spec.limits.logRate",
            "spec.scaling.min",
            "spec.scaling.target",
            "spec.egress[0]",
            "spec.env[0].name",
            "spec.env[1].valueFrom.fieldRef: Forbidden",
            "spec.traffic[1].tag: Duplicate value: \"t\"",
            "spec.traffic: Invalid value: 90",
            "spec.sticky.header",
            "spec.asyncInvocation.maximumRetryAttempts: Invalid value: 101: must be at most 100",
            "spec.asyncInvocation.retryDelay: Invalid value: \"500ms\": must be between 1s and 5m",
            "spec.asyncInvocation.maximumEventAge",
            "spec.asyncInvocation.onFailure: Invalid value: {}: set exactly one",
            "spec.asyncInvocation.onFailure.url",
        ] {
            assert!(found.iter().any(|error| error.starts_with(path)), "{path} is not in {found:#?}");
        }
    }

    #[test]
    fn files_belong_to_components_and_programs_to_images() {
        let digest = crate::Digest::of(b"x").to_string();
        let image = serde_json::json!({"image": "app:1", "command": ["/bin/app"], "args": ["-v"]});
        assert_eq!(errors(serde_json::json!({"source": image})), Vec::<String>::new());
        assert_eq!(
            errors(serde_json::json!({"source": image, "files": digest})),
            ["spec.files: Forbidden: an image carries its files itself"]
        );
        let component = serde_json::json!({"component": digest, "command": ["x"], "args": ["y"]});
        let found = errors(serde_json::json!({"source": component, "files": digest}));
        assert!(found.len() == 2 && found[0].starts_with("spec.source.command: Forbidden"), "{found:?}");
        let found = errors(serde_json::json!({"source": {"image": "a", "args": ["x", "a\u{0}b"]}}));
        assert!(found.len() == 1 && found[0].starts_with("spec.source.args[1]: Invalid value"), "{found:?}");
    }

    #[test]
    fn no_request_takes_longer_than_a_day() {
        let digest = crate::Digest::of(b"x").to_string();
        let with = |timeout: &str| {
            errors(serde_json::json!({"source": {"component": digest}, "limits": {"timeout": timeout}}))
        };
        assert_eq!(with("24h"), Vec::<String>::new());
        for timeout in ["24h1s", "5000000000000000h"] {
            let found = with(timeout);
            assert!(found.len() == 1 && found[0].contains("must be 24h or less"), "{timeout}: {found:?}");
        }
    }
}
