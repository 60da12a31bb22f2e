//! Validation of CertificateSigningRequests. (Rules: upstream `pkg/apis/certificates/validation`.)

use base64::{Engine, engine::general_purpose::STANDARD};
use mayfly_api::{names, validation::FieldError};
use serde_json::{Map, Value};

use super::{go_values::go_bytes, rules};
use crate::object::Object;

/// Sorted, as the error lists them.
const USAGES: [&str; 23] = [
    "any",
    "cert sign",
    "client auth",
    "code signing",
    "content commitment",
    "crl sign",
    "data encipherment",
    "decipher only",
    "digital signature",
    "email protection",
    "encipher only",
    "ipsec end system",
    "ipsec tunnel",
    "ipsec user",
    "key agreement",
    "key encipherment",
    "microsoft sgc",
    "netscape sgc",
    "ocsp signing",
    "s/mime",
    "server auth",
    "signing",
    "timestamping",
];
/// Longest domain of a signer, in bytes.
const DOMAIN_BYTES_MAX: usize = 253;
const BLOCK: &str = "-----BEGIN CERTIFICATE REQUEST-----";

pub(super) fn validate(new: &Object) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let spec = rules::get(new, &["spec"]);
    let request = STANDARD.decode(rules::text(spec, "request")).unwrap_or_default();
    if !String::from_utf8_lossy(&request).contains(BLOCK) {
        let detail = "PEM block type must be CERTIFICATE REQUEST";
        errors.push(FieldError::invalid("spec.request", go_bytes(&request), detail));
    }
    let usages: Vec<_> =
        rules::list_items(&spec["usages"]).map(|usage| usage.as_str().unwrap_or("")).collect();
    if usages.is_empty() {
        errors.push(FieldError::required("spec.usages", ""));
    }
    for (at, usage) in usages.iter().enumerate() {
        rules::one_of(usage, &USAGES, &format!("spec.usages[{at}]"), &mut errors);
    }
    for (at, usage) in usages.iter().enumerate().filter(|(at, usage)| usages[..*at].contains(usage)) {
        errors.push(rules::duplicate(format!("spec.usages[{at}]"), format!("{usage:?}")));
    }
    signer_name(rules::text(spec, "signerName"), &mut errors);
    if let Some(seconds) = spec["expirationSeconds"].as_i64().filter(|seconds| *seconds < 600) {
        let detail = "may not specify a duration less than 600 seconds (10 minutes)";
        errors.push(FieldError::invalid("spec.expirationSeconds", seconds, detail));
    }
    errors
}

/// Sets the times that new conditions lack (upstream's `populateConditionTimestamps`). `now`: as metadata has it.
pub(crate) fn set_condition_times(new: &mut Object, old: &Object, now: &Value) {
    let before = rules::get(old, &["status", "conditions"]).clone();
    let conditions = new.map_mut("status").get_mut("conditions").and_then(Value::as_array_mut);
    for condition in conditions.into_iter().flatten().filter_map(Value::as_object_mut) {
        let is_absent = |condition: &Map<String, Value>, field: &str| {
            condition.get(field).is_none_or(|time| time.is_null() || time == "")
        };
        if is_absent(condition, "lastUpdateTime") {
            condition.insert("lastUpdateTime".into(), now.clone());
        }
        if is_absent(condition, "lastTransitionTime") {
            let same = rules::list_items(&before).find(|old| {
                let is_same = |field: &str| condition.get(field) == old.get(field);
                is_same("type") && is_same("status")
            });
            let since = same.map(|old| &old["lastTransitionTime"]).filter(|time| time.is_string());
            condition.insert("lastTransitionTime".into(), since.unwrap_or(now).clone());
        }
    }
}

/// `example.com/name` (upstream's `ValidateSignerName`).
fn signer_name(name: &str, errors: &mut Vec<FieldError>) {
    const PATH: &str = "spec.signerName";
    let mut refuse = |part: &str, detail: String| {
        errors.push(FieldError::invalid(PATH, format!("{part:?}"), detail));
    };
    if name == "kubernetes.io/legacy-unknown" {
        return refuse(name, "the legacy signerName is not allowed via this API version".into());
    }
    let (domain, path) = match name.split('/').collect::<Vec<_>>().as_slice() {
        [domain, path] => (*domain, *path),
        _ if name.is_empty() => return errors.push(FieldError::required(PATH, "")),
        _ => {
            let detail = "must be a fully qualified domain and path of the form 'example.com/signer-name'";
            return refuse(name, detail.into());
        }
    };
    for label in domain.split('.') {
        if let Err(why) = names::dns_label(label) {
            refuse(domain, format!("validating label {label:?}: {why}"));
        }
    }
    if !domain.contains('.') {
        refuse(domain, "should be a domain with at least two segments separated by dots".into());
    }
    for label in path.split('.') {
        if let Err(why) = names::dns_subdomain(label) {
            refuse(path, format!("validating label {label:?}: {why}"));
        }
    }
    if domain.len() > DOMAIN_BYTES_MAX {
        errors.push(FieldError::too_long(PATH, DOMAIN_BYTES_MAX));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn requests_are_refused_in_upstreams_words() {
        let good = json!({"request": STANDARD.encode(format!("{BLOCK}\n")), "usages": ["client auth"],
            "signerName": "example.com/x"});
        let told = |change: Value| {
            let mut spec = good.clone();
            json_patch::merge(&mut spec, &change);
            let object = Object(json!({"spec": spec}).as_object().unwrap().clone());
            let errors = validate(&object);
            errors.iter().map(|error| format!("{}: {}", error.path, error.message())).collect::<Vec<_>>()
        };
        assert_eq!(told(json!({})), Vec::<String>::new());
        for (change, expected) in [
            (
                json!({"request": STANDARD.encode("no")}),
                "spec.request: Invalid value: []byte{0x6e, 0x6f}: PEM block type must be CERTIFICATE REQUEST",
            ),
            (json!({"usages": []}), "spec.usages: Required value"),
            (json!({"usages": ["any", "any"]}), "spec.usages[1]: Duplicate value: \"any\""),
            (
                json!({"signerName": "x"}),
                "spec.signerName: Invalid value: \"x\": must be a fully qualified domain and path of the form \
                 'example.com/signer-name'",
            ),
            (
                json!({"signerName": "com/x"}),
                "spec.signerName: Invalid value: \"com\": should be a domain with at least two segments separated by \
                 dots",
            ),
            (
                json!({"expirationSeconds": 5}),
                "spec.expirationSeconds: Invalid value: 5: may not specify a duration less than 600 seconds (10 \
                 minutes)",
            ),
        ] {
            assert_eq!(told(change), [expected]);
        }
        assert!(told(json!({"usages": ["fly"]}))[0].starts_with(
            "spec.usages[0]: Unsupported value: \"fly\": supported values: \"any\", \"cert sign\","
        ));
    }

    #[test]
    fn conditions_get_times() {
        let object = |conditions: Value| {
            Object(json!({"status": {"conditions": conditions}}).as_object().unwrap().clone())
        };
        let old = object(json!([{"type": "Approved", "status": "True", "lastTransitionTime": "a"}]));
        let mut new = object(json!([
            {"type": "Approved", "status": "True", "lastUpdateTime": "b", "lastTransitionTime": null},
            {"type": "Failed", "status": "True"},
        ]));
        set_condition_times(&mut new, &old, &json!("now"));
        let expected = object(json!([
            {"type": "Approved", "status": "True", "lastUpdateTime": "b", "lastTransitionTime": "a"},
            {"type": "Failed", "status": "True", "lastUpdateTime": "now", "lastTransitionTime": "now"},
        ]));
        assert_eq!(new.0, expected.0);
    }
}
