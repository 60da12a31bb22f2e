//! AdmissionReviews (`admission.k8s.io/v1`): the request that a webhook gets, and its response.

use base64::Engine as _;
use serde_json::{Value, json};

use super::{AdmissionOperation, check};
use crate::{
    object::Object,
    registry::Kind,
    verbs::{WriteRequest, apply_json, parse_json},
};

/// The attributes of a write, or of a connection, for admission.
pub(crate) struct AdmissionAttributes<'a> {
    pub(crate) request: &'a WriteRequest,
    pub(crate) operation: AdmissionOperation,
    /// Empty: the object itself.
    pub(crate) subresource: &'static str,
}

impl AdmissionAttributes<'_> {
    /// Group, version and kind of the written value; some subresources have a kind of their own.
    fn kind(&self) -> (&'static str, &'static str, &'static str) {
        match self.subresource {
            "scale" => ("autoscaling", "v1", "Scale"),
            "binding" => ("", "v1", "Binding"),
            "eviction" => ("policy", "v1", "Eviction"),
            "exec" => ("", "v1", "PodExecOptions"),
            "attach" => ("", "v1", "PodAttachOptions"),
            "portforward" => ("", "v1", "PodPortForwardOptions"),
            _ => (self.request.kind.group, self.request.kind.version, self.request.kind.kind),
        }
    }

    /// Whether the object itself is written, with the fields of its kind.
    pub(super) fn is_object(&self) -> bool {
        self.kind() == (self.request.kind.group, self.request.kind.version, self.request.kind.kind)
    }

    /// The `request` of a review, without the objects. Its name is that of the first object that is given.
    pub(in crate::admission) fn request_value(&self, objects: [Option<&Object>; 2]) -> Value {
        let Self { request, operation, subresource } = self;
        let (kind, user) = (request.kind, &request.user);
        let (group, version, name) = self.kind();
        let of_kind = json!({"group": group, "version": version, "kind": name});
        let resource = json!({"group": kind.group, "version": kind.version, "resource": kind.plural});
        let options = match operation {
            AdmissionOperation::Create => "CreateOptions",
            AdmissionOperation::Update => "UpdateOptions",
            AdmissionOperation::Delete => "DeleteOptions",
            AdmissionOperation::Connect => "",
        };
        let name = objects.into_iter().flatten().next().map_or("", Object::name);
        let mut body = json!({
            "uid": uuid::Uuid::new_v4().to_string(),
            "kind": of_kind,
            "resource": resource,
            "requestKind": of_kind,
            "requestResource": resource,
            "name": name,
            "operation": operation.name(),
            "userInfo": {"username": user.name, "groups": user.groups},
            "dryRun": request.dry_run,
        });
        if !options.is_empty() {
            body["options"] = json!({"kind": options, "apiVersion": "meta.k8s.io/v1"});
        }
        if !subresource.is_empty() {
            body["subResource"] = (*subresource).into();
            body["requestSubResource"] = (*subresource).into();
        }
        if kind.namespaced || kind.plural == "namespaces" {
            body["namespace"] = if kind.namespaced { request.namespace.as_str() } else { name }.into();
        }
        if !user.uid.is_empty() {
            body["userInfo"]["uid"] = user.uid.as_str().into();
        }
        if !user.extra.is_empty() {
            body["userInfo"]["extra"] = json!(user.extra);
        }
        body
    }
}

/// The write that webhooks decide about.
pub(super) struct Review<'a> {
    pub(super) attributes: &'a AdmissionAttributes<'a>,
    pub(super) new: Option<&'a Object>,
    pub(super) old: Option<&'a Object>,
}

impl Review<'_> {
    /// The review as it is sent, with a uid of its own.
    pub(super) fn body(&self) -> Value {
        let Self { attributes, new, old } = self;
        let object = |object: &Option<&Object>| object.map_or(Value::Null, |object| json!(object.0));
        let mut body = attributes.request_value([*new, *old]);
        body["object"] = object(new);
        body["oldObject"] = object(old);
        json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": body})
    }
}

/// A webhook's response.
#[derive(Debug, Default, PartialEq)]
pub(super) struct WebhookVerdict {
    /// The reason why the request is refused; `None` if it is allowed.
    pub(super) denied: Option<Denied>,
    pub(super) patch: Option<Value>,
    pub(super) warnings: Vec<String>,
}

/// The status of a refusal, as the webhook gave it.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Denied {
    pub(crate) code: u16,
    pub(crate) reason: String,
    pub(crate) message: String,
}

impl WebhookVerdict {
    /// Reads the response to the review `asked`.
    pub(super) fn parse(answer: &Value, asked: &Value) -> Result<Self, String> {
        if answer["apiVersion"] != asked["apiVersion"] || answer["kind"] != asked["kind"] {
            return Err("expected webhook response of admission.k8s.io/v1, Kind=AdmissionReview".into());
        }
        let response = &answer["response"];
        if !response.is_object() {
            return Err("webhook response was absent".into());
        }
        let (expected, found) = (&asked["request"]["uid"], &response["uid"]);
        if expected != found {
            return Err(format!("expected response.uid={expected}, got {found}"));
        }
        let text = |value: &Value| value.as_str().unwrap_or("").to_owned();
        let warnings = response["warnings"].as_array().into_iter().flatten().map(text).collect();
        if response["allowed"] != true {
            let status = &response["status"];
            let code = status["code"].as_u64().and_then(|code| u16::try_from(code).ok()).unwrap_or(0);
            let denied = Denied { code, reason: text(&status["reason"]), message: text(&status["message"]) };
            return Ok(Self { denied: Some(denied), patch: None, warnings });
        }
        let patch = match (response["patch"].as_str(), response["patchType"].as_str()) {
            (None | Some(""), _) => None,
            (Some(encoded), Some("JSONPatch")) => {
                let bytes = base64::engine::general_purpose::STANDARD.decode(encoded);
                let bytes = bytes.map_err(|error| format!("response.patch is not base64: {error}"))?;
                let patch = serde_json::from_slice(&bytes);
                Some(patch.map_err(|error| format!("response.patch is not JSON: {error}"))?)
            }
            (Some(_), _) => return Err("response.patchType must be JSONPatch if a patch is given".into()),
        };
        Ok(Self { denied: None, patch, warnings })
    }
}

/// Applies a webhook's JSON patch and sets the defaults. A webhook cannot change the object's identity. `kind`:
/// `None` if the value is not an object of the request's kind.
pub(super) fn patched(kind: Option<&Kind>, object: &Object, patch: &Value) -> Result<Object, String> {
    let patch = parse_json(patch).map_err(|error| error.message)?;
    let mut value = Value::Object(object.0.clone());
    apply_json(&mut value, &patch).map_err(|_| "the patch does not apply to the object".to_owned())?;
    let Value::Object(map) = value else { return Err("the patched object is not a JSON object".into()) };
    let mut patched = Object(map);
    for field in ["name", "namespace", "uid"] {
        if patched.meta_str(field) != object.meta_str(field) {
            return Err(format!("the patch changes metadata.{field}"));
        }
    }
    if ["apiVersion", "kind"].iter().any(|field| patched.0.get(*field) != object.0.get(*field)) {
        return Err("the patch changes the object's type".into());
    }
    if let Some(kind) = kind {
        check(kind, &mut patched)?;
        kind.fill_defaults(&mut patched);
    }
    Ok(patched)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked() -> Value {
        json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {"uid": "u"}})
    }

    fn answer(response: Value) -> Value {
        json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response})
    }

    #[test]
    fn a_refusal_has_the_webhooks_status() {
        let response = json!({"uid": "u", "allowed": false, "warnings": ["w"],
            "status": {"code": 403, "reason": "Forbidden", "message": "no"}});
        let verdict = WebhookVerdict::parse(&answer(response), &asked()).unwrap();
        let denied = Denied { code: 403, reason: "Forbidden".into(), message: "no".into() };
        assert_eq!(verdict, WebhookVerdict { denied: Some(denied), patch: None, warnings: vec!["w".into()] });
    }

    #[test]
    fn a_patch_is_a_json_patch_in_base64() {
        let patch = json!([{"op": "add", "path": "/data", "value": {"a": "b"}}]);
        let encoded = base64::engine::general_purpose::STANDARD.encode(patch.to_string());
        let response = json!({"uid": "u", "allowed": true, "patch": encoded, "patchType": "JSONPatch"});
        let verdict = WebhookVerdict::parse(&answer(response.clone()), &asked()).unwrap();
        assert_eq!(verdict.patch, Some(patch));
        for (field, value) in [("patchType", json!("Other")), ("patch", json!("!")), ("uid", json!("v"))] {
            let mut response = response.clone();
            response[field] = value;
            WebhookVerdict::parse(&answer(response), &asked()).unwrap_err();
        }
        WebhookVerdict::parse(&json!({}), &asked()).unwrap_err();
        WebhookVerdict::parse(&answer(Value::Null), &asked()).unwrap_err();
    }

    #[test]
    fn a_patch_cannot_make_it_another_object() {
        let kind = crate::registry::registry().find("", "v1", "configmaps").unwrap();
        let map =
            json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "namespace": "n"}});
        let Value::Object(map) = map else { unreachable!() };
        let object = Object(map);
        let add = json!([{"op": "add", "path": "/data", "value": {"a": "b"}}]);
        assert_eq!(patched(Some(kind), &object, &add).unwrap().str_at(&["data", "a"]), "b");
        let rename = json!([{"op": "replace", "path": "/metadata/name", "value": "b"}]);
        assert_eq!(patched(Some(kind), &object, &rename).unwrap_err(), "the patch changes metadata.name");
        let wrong = json!([{"op": "add", "path": "/data", "value": "text"}]);
        patched(Some(kind), &object, &wrong).unwrap_err();
        let absent = json!([{"op": "remove", "path": "/data"}]);
        patched(Some(kind), &object, &absent).unwrap_err();
    }
}
