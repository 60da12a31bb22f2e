//! `/openapi/v3`, and `/openapi/v2` derived from it: the documents that `kubectl explain` shows and that `kubectl
//! apply` reads before it sends anything.
//!
//! Documents are generated from the kinds' schemas on request and not kept: kubectl caches them by the hash in their
//! URL. The PATCH operations do not list strategic merge: kubectl then computes such patches from its own types, which
//! have the merge keys, instead of from the document.

mod v2;

use std::{collections::BTreeMap, sync::OnceLock};

use axum::response::Response;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::{
    custom::ServedKinds,
    registry::{Backing, Kind},
    render::{json_response, json_value},
    schema::definitions,
    status::ApiError,
};

const LIST_META: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.ListMeta";

/// Answers `/openapi/…`.
pub(crate) fn answer(
    served: &ServedKinds,
    path: &[String],
    hash: Option<&str>,
    headers: &HeaderMap,
) -> Result<Response, ApiError> {
    let path: Vec<&str> = path.iter().map(String::as_str).collect();
    let (group, version) = match path.as_slice() {
        ["openapi", "v3"] => return Ok(json_value(StatusCode::OK, &index(served))),
        ["openapi", "v3", "api", version] => ("", *version),
        ["openapi", "v3", "apis", group, version] => (*group, *version),
        // kubectl requests version 2 for kinds that version 3 lacks. An empty document makes it report that the kind
        // is unknown; an error would be reported as a failed download.
        ["openapi", "v2"] if wants_protobuf(headers) => return Ok(nothing_in_v2()),
        ["openapi", "v2"] => return Ok(json_value(StatusCode::OK, &v2::document(documents(served)))),
        _ => return Err(ApiError::no_resource()),
    };
    let text = document(served, group, version).ok_or_else(ApiError::no_resource)?;
    let fresh = hash.is_some_and(|hash| hash_of(&text) == hash);
    let mut response = json_response(StatusCode::OK, text);
    let cache = if fresh { "public, immutable, max-age=31536000" } else { "no-cache, private" };
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static(cache));
    Ok(response)
}

/// Whether protobuf is the only form that is accepted.
fn wants_protobuf(headers: &HeaderMap) -> bool {
    let accepted = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or("");
    accepted.contains("protobuf") && !accepted.contains("json") && !accepted.contains("*/*")
}

/// The documents of all groups and versions.
fn documents(served: &ServedKinds) -> impl Iterator<Item = Value> {
    let versions = served.groups().into_iter();
    let versions =
        versions.flat_map(|(group, versions)| versions.into_iter().map(move |version| (group, version)));
    versions.filter_map(move |(group, version)| document_value(served, group, version))
}

/// An empty document of version 2: in protobuf, no bytes.
fn nothing_in_v2() -> Response {
    let kind = HeaderValue::from_static("application/com.github.proto-openapi.spec.v2.v1.0+protobuf");
    let mut response = Response::default();
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

/// `api/v1`, `apis/mayfly.dev/v1`.
fn address(group: &str, version: &str) -> String {
    if group.is_empty() { format!("api/{version}") } else { format!("apis/{group}/{version}") }
}

fn hash_of(document: &[u8]) -> String {
    hex::encode(&Sha256::digest(document)[..16])
}

/// The hash of each document. Those of built-in kinds are computed once.
fn hashes(served: &ServedKinds) -> BTreeMap<String, String> {
    static BUILT_IN: OnceLock<BTreeMap<String, String>> = OnceLock::new();
    let hashes_of = |served: &ServedKinds, wanted: &dyn Fn(&str, &str) -> bool| {
        let versions = served.groups().into_iter();
        let versions =
            versions.flat_map(|(group, versions)| versions.into_iter().map(move |version| (group, version)));
        versions
            .filter(|(group, version)| wanted(group, version))
            .filter_map(|(group, version)| {
                Some((address(group, version), hash_of(&document(served, group, version)?)))
            })
            .collect::<BTreeMap<_, _>>()
    };
    let built_in = BUILT_IN.get_or_init(|| hashes_of(&ServedKinds::default(), &|_, _| true));
    let has_custom =
        |group: &str, version: &str| served.in_group(group, version).any(|kind| kind.definition.is_some());
    let mut hashes = built_in.clone();
    hashes.extend(hashes_of(served, &has_custom));
    hashes
}

fn index(served: &ServedKinds) -> Value {
    let paths: Map<String, Value> = hashes(served)
        .iter()
        .map(|(address, hash)| {
            (address.clone(), json!({"serverRelativeURL": format!("/openapi/v3/{address}?hash={hash}")}))
        })
        .collect();
    json!({"paths": paths})
}

/// The document of one group and version.
fn document(served: &ServedKinds, group: &str, version: &str) -> Option<Vec<u8>> {
    let document = document_value(served, group, version)?;
    Some(serde_json::to_vec(&document).expect("a JSON value serialises"))
}

fn document_value(served: &ServedKinds, group: &str, version: &str) -> Option<Value> {
    let kinds: Vec<&Kind> = served.in_group(group, version).collect();
    if kinds.is_empty() {
        return None;
    }
    let (mut schemas, names) = definitions(&kinds);
    let mut paths = Map::new();
    for (kind, name) in kinds.iter().zip(&names) {
        let gvk = json!({"group": kind.group, "version": kind.version, "kind": kind.kind});
        if let Some(schema) = schemas.get_mut(name).and_then(Value::as_object_mut) {
            schema.insert("x-kubernetes-group-version-kind".into(), json!([gvk]));
        }
        if kind.backing != Backing::Review {
            schemas.insert(format!("{name}List"), list_schema(kind, name));
        }
        paths_of(kind, name, &gvk, &mut paths);
    }
    if !schemas.contains_key(LIST_META) {
        schemas.insert(LIST_META.into(), list_meta_schema());
    }
    Some(json!({
        "openapi": "3.0.0",
        "info": {"title": "Mayfly", "version": env!("CARGO_PKG_VERSION")},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"BearerToken": {"type": "apiKey", "name": "authorization", "in": "header"}},
        },
    }))
}

fn reference(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

fn list_schema(kind: &Kind, name: &str) -> Value {
    json!({
        "description": format!("{}List is a list of {}.", kind.kind, kind.plural),
        "type": "object",
        "required": ["items"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"allOf": [reference(LIST_META)]},
            "items": {"type": "array", "items": {"allOf": [reference(name)]}},
        },
        "x-kubernetes-group-version-kind":
            [{"group": kind.group, "version": kind.version, "kind": format!("{}List", kind.kind)}],
    })
}

fn list_meta_schema() -> Value {
    json!({
        "description": "ListMeta describes metadata that synthetic resources must have, including lists.",
        "type": "object",
        "properties": {
            "continue": {"type": "string"},
            "remainingItemCount": {"type": "integer", "format": "int64"},
            "resourceVersion": {"type": "string"},
            "selfLink": {"type": "string"},
        },
    })
}

const WRITE: &[&str] = &["dryRun", "fieldManager", "fieldValidation"];
const PATCH: &[&str] = &["dryRun", "fieldManager", "fieldValidation", "force"];
const DELETE: &[&str] = &["dryRun", "gracePeriodSeconds", "propagationPolicy", "orphanDependents"];
const LIST: &[&str] = &[
    "labelSelector",
    "fieldSelector",
    "limit",
    "continue",
    "resourceVersion",
    "resourceVersionMatch",
    "timeoutSeconds",
    "watch",
    "allowWatchBookmarks",
    "sendInitialEvents",
];

/// The operations of one kind, as `paths` describes them.
struct Operations<'a> {
    kind: &'a Kind,
    /// The name of the schema.
    name: &'a str,
    gvk: &'a Value,
}

impl Operations<'_> {
    fn described(&self, action: &str, parameters: &[&str], schema: &str) -> Value {
        let scope = if self.kind.namespaced { "Namespaced" } else { "" };
        let parameters: Vec<_> = parameters.iter().map(|name| query_parameter(name)).collect();
        json!({
            "description": format!("{action} {}", self.kind.plural),
            "operationId": format!("{action}{scope}{}", self.kind.kind),
            "parameters": parameters,
            "responses": {"200": {"description": "OK", "content": {"application/json": {"schema": reference(schema)}}}},
            "x-kubernetes-action": action,
            "x-kubernetes-group-version-kind": self.gvk,
        })
    }

    /// An operation on one object.
    fn of_one(&self, action: &str, parameters: &[&str]) -> Value {
        self.described(action, parameters, self.name)
    }

    /// An operation on a list.
    fn of_many(&self, action: &str, parameters: &[&str]) -> Value {
        self.described(action, parameters, &format!("{}List", self.name))
    }

    /// An operation with an object as its body.
    fn written(&self, action: &str) -> Value {
        let schema = json!({"schema": reference(self.name)});
        let body = json!({"application/json": schema, "application/yaml": schema});
        with_body(self.of_one(action, WRITE), body)
    }

    fn patch(&self) -> Value {
        let patch = json!({"schema": {"type": "object", "description": "a patch of this kind"}});
        let body = json!({
            "application/apply-patch+yaml": patch, "application/json-patch+json": patch,
            "application/merge-patch+json": patch,
        });
        with_body(self.of_one("patch", PATCH), body)
    }
}

fn with_body(mut operation: Value, body: Value) -> Value {
    operation["requestBody"] = json!({"content": body, "required": true});
    operation
}

fn paths_of(kind: &Kind, name: &str, gvk: &Value, paths: &mut Map<String, Value>) {
    let operations = Operations { kind, name, gvk };
    let base = match kind.group {
        "" => format!("/api/{}", kind.version),
        group => format!("/apis/{group}/{}", kind.version),
    };
    let namespace = if kind.namespaced { "/namespaces/{namespace}" } else { "" };
    let all = format!("{base}{namespace}/{}", kind.plural);
    let place: Vec<_> = kind.namespaced.then(|| path_parameter("namespace")).into_iter().collect();
    let mut collection = json!({"parameters": place, "post": operations.written("post")});
    if kind.backing != Backing::Review {
        collection["get"] = operations.of_many("list", LIST);
        if kind.namespaced {
            let everywhere = json!({"get": operations.of_many("list", LIST)});
            paths.insert(format!("{base}/{}", kind.plural), everywhere);
        }
        let one_path = format!("{all}/{{name}}");
        let place = [&place[..], &[path_parameter("name")]].concat();
        let mut one = json!({"parameters": place, "get": operations.of_one("get", &["resourceVersion"])});
        if kind.backing != Backing::Stored {
            // kubectl reads the PATCH operation to detect server-side field validation. Without it, kubectl refuses
            // to send requests whose response would explain the remedy.
            one["patch"] = operations.of_one("patch", &["fieldValidation"]);
        } else {
            if kind.allows("deletecollection") {
                collection["delete"] = operations.of_many("deletecollection", DELETE);
            }
            one["put"] = operations.written("put");
            one["patch"] = operations.patch();
            if kind.status {
                paths.insert(format!("{one_path}/status"), one.clone());
            }
            one["delete"] = operations.of_one("delete", DELETE);
        }
        paths.insert(one_path, one);
    }
    paths.insert(all, collection);
}

fn path_parameter(name: &str) -> Value {
    json!({"name": name, "in": "path", "required": true, "schema": {"type": "string", "uniqueItems": true}})
}

fn query_parameter(name: &str) -> Value {
    let (kind, description) = match name {
        "fieldValidation" => (
            "string",
            "fieldValidation instructs the server on how to handle objects in the request (POST/PUT/PATCH) \
             containing unknown or duplicate fields: Ignore, Warn (the default) or Strict.",
        ),
        "dryRun" => {
            ("string", "When present, indicates that modifications should not be persisted. Valid: All.")
        }
        "fieldManager" => ("string", "The name associated with the actor that is making these changes."),
        "force" => {
            ("boolean", "Force is going to \"force\" Apply requests: conflicting fields are taken over.")
        }
        "watch" | "allowWatchBookmarks" | "sendInitialEvents" | "orphanDependents" => ("boolean", ""),
        "limit" | "timeoutSeconds" | "gracePeriodSeconds" => ("integer", ""),
        _ => ("string", ""),
    };
    json!({"name": name, "in": "query", "description": description, "schema": {"type": kind, "uniqueItems": true}})
}
