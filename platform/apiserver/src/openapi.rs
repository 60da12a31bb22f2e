//! `/openapi/v3` (and an empty `/openapi/v2`): what `kubectl explain` shows and `kubectl apply` asks for before it sends anything.
//!
//! Documents are made from the kinds' schemas when they are asked for and not kept: kubectl caches them by the
//! hash in their address. The PATCH operations do not list strategic merge: kubectl then computes such patches
//! from its own types, which know the merge keys, instead of from the document.

use std::{collections::BTreeMap, sync::OnceLock};

use axum::response::Response;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::{
    registry::{Kind, Verbs, registry},
    render::{json_response, json_value},
    schema::definitions,
    status::ApiError,
};

const LIST_META: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.ListMeta";

/// Answers `/openapi/…`.
pub(crate) fn answer(path: &[String], hash: Option<&str>, headers: &HeaderMap) -> Result<Response, ApiError> {
    let path: Vec<&str> = path.iter().map(String::as_str).collect();
    let (group, version) = match path.as_slice() {
        ["openapi", "v3"] => return Ok(json_value(StatusCode::OK, &index())),
        ["openapi", "v3", "api", version] => ("", *version),
        ["openapi", "v3", "apis", group, version] => (*group, *version),
        ["openapi", "v2"] => return Ok(version_2(headers)),
        _ => return Err(ApiError::no_resource()),
    };
    let text = document(group, version).ok_or_else(ApiError::no_resource)?;
    let mut response = json_response(StatusCode::OK, text);
    let fresh =
        hash.is_some_and(|hash| hashes().get(&address(group, version)).is_some_and(|known| known == hash));
    let cache = if fresh { "public, immutable, max-age=31536000" } else { "no-cache, private" };
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static(cache));
    Ok(response)
}

/// A document of version 2 that describes nothing. kubectl asks for it when version 3 does not know a kind; with it
/// kubectl goes on, and says that the kind does not exist, instead of that there is no document.
fn version_2(headers: &HeaderMap) -> Response {
    const ASKED: &str = "proto-openapi.spec.v2";
    // With an at sign, as older clients ask for it, it is no media type that they could parse.
    const PROTOBUF: &str = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf";
    // gnostic's `Document`: swagger (1), info (2) with title (1) and version (2), paths (8).
    const EMPTY: &[u8] = b"\x0a\x032.0\x12\x0d\x0a\x06Mayfly\x12\x031.0\x42\x00";
    let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or("");
    if !accept.contains(ASKED) {
        let info = json!({"title": "Mayfly", "version": "1.0"});
        return json_value(StatusCode::OK, &json!({"swagger": "2.0", "info": info, "paths": {}}));
    }
    let mut response = json_response(StatusCode::OK, EMPTY);
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(PROTOBUF));
    response
}

/// `api/v1`, `apis/mayfly.dev/v1`.
fn address(group: &str, version: &str) -> String {
    if group.is_empty() { format!("api/{version}") } else { format!("apis/{group}/{version}") }
}

/// The hash of each document; computed once.
fn hashes() -> &'static BTreeMap<String, String> {
    static HASHES: OnceLock<BTreeMap<String, String>> = OnceLock::new();
    HASHES.get_or_init(|| {
        let versions = registry().groups().into_iter();
        let versions =
            versions.flat_map(|(group, versions)| versions.into_iter().map(move |version| (group, version)));
        versions
            .filter_map(|(group, version)| {
                let text = document(group, version)?;
                Some((address(group, version), hex::encode(&Sha256::digest(text)[..16])))
            })
            .collect()
    })
}

fn index() -> Value {
    let paths: Map<String, Value> = hashes()
        .iter()
        .map(|(address, hash)| {
            (address.clone(), json!({"serverRelativeURL": format!("/openapi/v3/{address}?hash={hash}")}))
        })
        .collect();
    json!({"paths": paths})
}

/// The document of one group and version.
fn document(group: &str, version: &str) -> Option<Vec<u8>> {
    let kinds: Vec<&Kind> = registry().in_group(group, version).collect();
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
        if kind.verbs != Verbs::CreateOnly {
            schemas.insert(format!("{name}List"), list_schema(kind, name));
        }
        paths_of(kind, name, &gvk, &mut paths);
    }
    if !schemas.contains_key(LIST_META) {
        schemas.insert(LIST_META.into(), list_meta_schema());
    }
    let document = json!({
        "openapi": "3.0.0",
        "info": {"title": "Mayfly", "version": env!("CARGO_PKG_VERSION")},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"BearerToken": {"type": "apiKey", "name": "authorization", "in": "header"}},
        },
    });
    Some(serde_json::to_vec(&document).expect("a JSON value serialises"))
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

fn paths_of(kind: &Kind, name: &str, gvk: &Value, paths: &mut Map<String, Value>) {
    let base = match kind.group {
        "" => format!("/api/{}", kind.version),
        group => format!("/apis/{group}/{}", kind.version),
    };
    let namespace = if kind.namespaced { "/namespaces/{namespace}" } else { "" };
    let all = format!("{base}{namespace}/{}", kind.plural);
    let mut place = Vec::new();
    if kind.namespaced {
        place.push(path_parameter("namespace"));
    }
    let parameters = |extra: &[&str]| extra.iter().map(|name| query_parameter(name)).collect::<Vec<_>>();
    let operation = |action: &str, extra: &[&str], body: Option<Value>, schema: &str| {
        let mut operation = json!({
            "description": format!("{action} {}", kind.plural),
            "operationId": format!("{action}{}{}", if kind.namespaced { "Namespaced" } else { "" }, kind.kind),
            "parameters": parameters(extra),
            "responses": {"200": {"description": "OK", "content": {"application/json": {"schema": reference(schema)}}}},
            "x-kubernetes-action": action,
            "x-kubernetes-group-version-kind": gvk,
        });
        if let Some(body) = body {
            operation["requestBody"] = json!({"content": body, "required": true});
        }
        operation
    };
    let json_body = || {
        let schema = json!({"schema": reference(name)});
        Some(json!({"application/json": schema, "application/yaml": schema}))
    };
    const WRITE: &[&str] = &["dryRun", "fieldManager", "fieldValidation"];
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
    const DELETE: &[&str] = &["dryRun", "gracePeriodSeconds", "propagationPolicy", "orphanDependents"];
    let mut collection = json!({"parameters": place, "post": operation("post", WRITE, json_body(), name)});
    if kind.verbs == Verbs::View {
        let list = format!("{name}List");
        collection["get"] = operation("list", LIST, None, &list);
        paths.insert(all.clone(), collection);
        paths.insert(format!("{base}/{}", kind.plural), json!({"get": operation("list", LIST, None, &list)}));
        place.push(path_parameter("name"));
        // kubectl looks at a patch to see whether the server validates fields; without it, it refuses to send what
        // would be answered with what to do instead.
        let one = json!({
            "parameters": place,
            "get": operation("get", &["resourceVersion"], None, name),
            "patch": operation("patch", &["fieldValidation"], None, name),
        });
        paths.insert(format!("{all}/{{name}}"), one);
        return;
    }
    if kind.verbs == Verbs::All {
        let list = format!("{name}List");
        collection["get"] = operation("list", LIST, None, &list);
        collection["delete"] = operation("deletecollection", DELETE, None, &list);
        let patch = json!({"schema": {"type": "object", "description": "a patch of this kind"}});
        let patches = json!({
            "application/apply-patch+yaml": patch, "application/json-patch+json": patch, "application/merge-patch+json": patch,
        });
        let patch_parameters = &["dryRun", "fieldManager", "fieldValidation", "force"];
        place.push(path_parameter("name"));
        let one = json!({
            "parameters": place,
            "get": operation("get", &["resourceVersion"], None, name),
            "put": operation("put", WRITE, json_body(), name),
            "patch": operation("patch", patch_parameters, Some(patches), name),
            "delete": operation("delete", DELETE, None, name),
        });
        let one_path = format!("{all}/{{name}}");
        if kind.status {
            let mut status = one.clone();
            if let Some(status) = status.as_object_mut() {
                status.remove("delete");
            }
            paths.insert(format!("{one_path}/status"), status);
        }
        paths.insert(one_path, one);
        if kind.namespaced {
            let everywhere = operation("list", LIST, None, &list);
            paths.insert(format!("{base}/{}", kind.plural), json!({"get": everywhere}));
        }
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
