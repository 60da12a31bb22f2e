//! Discovery: which groups, versions and kinds there are; in the legacy and the aggregated form.

use axum::response::Response;
use base64::{Engine, engine::general_purpose::STANDARD};
use http::{HeaderMap, HeaderValue, StatusCode, header};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::{
    custom::ServedKinds,
    negotiate,
    registry::{Backing, Kind},
    render::{json_response, json_value},
    status::ApiError,
};

/// The Kubernetes version whose API is served: the version of the types.
const MINOR: &str = "33";

/// `/version`.
pub(crate) fn version() -> Value {
    let platform = match std::env::consts::ARCH {
        "x86_64" => "linux/amd64",
        "aarch64" => "linux/arm64",
        _ => "linux/unknown",
    };
    json!({
        "major": "1",
        "minor": MINOR,
        "gitVersion": concat!("v1.33.0+mayfly-", env!("CARGO_PKG_VERSION")),
        "gitCommit": "",
        "gitTreeState": "clean",
        "buildDate": "1970-01-01T00:00:00Z",
        "goVersion": "",
        "compiler": "rustc",
        "platform": platform,
    })
}

/// Answers `/api`, `/apis` and the paths below them down to a version. `None` for the path of a resource.
pub(crate) fn answer(
    served: &ServedKinds,
    path: &[String],
    headers: &HeaderMap,
) -> Option<Result<Response, ApiError>> {
    let path: Vec<&str> = path.iter().map(String::as_str).collect();
    let known = |group: &str, version: &str| served.in_group(group, version).next().is_some();
    let value = match path.as_slice() {
        ["api"] => match negotiate::aggregated_discovery(headers) {
            Some(form) => return Some(Ok(aggregated(served, form, true))),
            None => json!({
                "kind": "APIVersions",
                "versions": ["v1"],
                "serverAddressByClientCIDRs": [{"clientCIDR": "0.0.0.0/0", "serverAddress": ""}],
            }),
        },
        ["apis"] => match negotiate::aggregated_discovery(headers) {
            Some(form) => return Some(Ok(aggregated(served, form, false))),
            None => {
                let groups: Vec<_> =
                    named_groups(served).map(|(group, versions)| api_group(group, &versions)).collect();
                json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
            }
        },
        ["api", version] if known("", version) => resource_list(served, "", version),
        ["apis", group] => match named_groups(served).find(|(name, _)| name == group) {
            Some((name, versions)) => {
                let mut value = api_group(name, &versions);
                value["kind"] = "APIGroup".into();
                value["apiVersion"] = "v1".into();
                value
            }
            None => return Some(Err(ApiError::no_path())),
        },
        ["apis", group, version] if known(group, version) => resource_list(served, group, version),
        ["apis", group, _] if !served.kinds().any(|kind| kind.group == *group) => {
            return Some(Err(ApiError::no_path()));
        }
        ["api", _] | ["apis", _, _] => return Some(Err(ApiError::no_resource())),
        _ => return None,
    };
    Some(Ok(json_value(StatusCode::OK, &value)))
}

/// All groups but the core one.
fn named_groups(served: &ServedKinds) -> impl Iterator<Item = (&'static str, Vec<&'static str>)> {
    served.groups().into_iter().filter(|(group, _)| !group.is_empty())
}

fn api_group(group: &str, versions: &[&str]) -> Value {
    let version = |version: &str| json!({"groupVersion": format!("{group}/{version}"), "version": version});
    let list: Vec<_> = versions.iter().map(|v| version(v)).collect();
    json!({"name": group, "versions": list, "preferredVersion": list[0]})
}

/// The legacy list of a version: resources and, as `name/sub`, their subresources.
fn resource_list(served: &ServedKinds, group: &str, version: &str) -> Value {
    let mut resources = Vec::new();
    for kind in served.in_group(group, version) {
        let mut resource = json!({
            "name": kind.plural,
            "singularName": kind.singular,
            "namespaced": kind.namespaced,
            "kind": kind.kind,
            "verbs": kind.verbs,
        });
        if !kind.short_names.is_empty() {
            resource["shortNames"] = kind.short_names.into();
        }
        if !kind.categories.is_empty() {
            resource["categories"] = kind.categories.into();
        }
        if kind.backing == Backing::Stored {
            resource["storageVersionHash"] = storage_version_hash(kind).into();
        }
        resources.push(resource);
        for (name, group, version, sub_kind, verbs) in subresources(kind) {
            let mut resource = json!({
                "name": format!("{}/{name}", kind.plural),
                "singularName": "",
                "namespaced": kind.namespaced,
                "kind": sub_kind,
                "verbs": verbs,
            });
            if (group, version) != (kind.group, kind.version) {
                resource["group"] = group.into();
                resource["version"] = version.into();
            }
            resources.push(resource);
        }
    }
    // Custom kinds have their subresources in the order status, scale.
    let is_custom = served.in_group(group, version).any(|kind| kind.definition.is_some());
    let key = |resource: &Value| {
        let name = resource["name"].as_str().unwrap_or("").to_owned();
        if is_custom { name.replace("/scale", "/~scale") } else { name }
    };
    resources.sort_by_key(key);
    let group_version = if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") };
    if group.is_empty() {
        // Upstream's list of the core group has no `apiVersion`.
        return json!({"kind": "APIResourceList", "groupVersion": group_version, "resources": resources});
    }
    json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": resources})
}

/// A short name of the version in which a kind is stored (upstream's `StorageVersionHash`).
fn storage_version_hash(kind: &Kind) -> String {
    let (group, version, name) = match kind.conversion {
        Some(conversion) if conversion.resource.starts_with("horizontal") => (kind.group, "v2", kind.kind),
        Some(_) => ("", "v1", kind.kind),
        // Upstream still hashes the first storage version of these kinds.
        None if matches!(kind.plural, "endpointslices" | "customresourcedefinitions") => {
            (kind.group, "v1beta1", kind.kind)
        }
        None => (kind.group, kind.version, kind.kind),
    };
    let digest = Sha256::digest(format!("{group}/{version}/{name}"));
    STANDARD.encode(&digest[..8])
}

type Described = (&'static str, &'static str, &'static str, &'static str, &'static [&'static str]);

/// Name, group, version, kind and verbs of each subresource. A subresource with an empty kind has the kind of the
/// resource.
fn subresources(kind: &Kind) -> impl Iterator<Item = Described> {
    let status: Option<Described> =
        kind.status.then_some(("status", kind.group, kind.version, kind.kind, &["get", "patch", "update"]));
    let own = (kind.group, kind.version, kind.kind);
    let others = kind.subresources.iter().map(move |subresource| match subresource.describe() {
        (name, "", "", "", verbs) => (name, own.0, own.1, own.2, verbs),
        described => described,
    });
    others.chain(connections(kind).iter().copied()).chain(status)
}

/// The subresources that connect a client with a pod, a node or a function.
fn connections(kind: &Kind) -> &'static [Described] {
    const STREAM: &[&str] = &["create", "get"];
    const PROXY: &[&str] = &["create", "delete", "get", "patch", "update"];
    match (kind.group, kind.plural) {
        ("", "pods") => &[
            ("attach", "", "v1", "PodAttachOptions", STREAM),
            ("exec", "", "v1", "PodExecOptions", STREAM),
            ("portforward", "", "v1", "PodPortForwardOptions", STREAM),
            ("proxy", "", "v1", "PodProxyOptions", PROXY),
        ],
        ("", "services") => &[("proxy", "", "v1", "ServiceProxyOptions", PROXY)],
        ("", "nodes") => &[("proxy", "", "v1", "NodeProxyOptions", PROXY)],
        ("mayfly.dev", "functions") => &[("proxy", "", "v1", "FunctionProxyOptions", PROXY)],
        _ => &[],
    }
}

fn aggregated(served: &ServedKinds, form: &'static str, core: bool) -> Response {
    let groups = served.groups();
    let groups = groups.iter().filter(|(group, _)| group.is_empty() == core);
    let items: Vec<_> = groups
        .map(|(group, versions)| {
            let versions: Vec<_> = versions
                .iter()
                .map(|version| {
                    let resources: Vec<_> =
                        served.in_group(group, version).map(aggregated_resource).collect();
                    json!({"version": version, "freshness": "Current", "resources": resources})
                })
                .collect();
            json!({"metadata": {"name": group, "creationTimestamp": null}, "versions": versions})
        })
        .collect();
    let body = json!({
        "kind": "APIGroupDiscoveryList",
        "apiVersion": format!("apidiscovery.k8s.io/{form}"),
        "metadata": {},
        "items": items,
    });
    let mut response = json_response(StatusCode::OK, body.to_string());
    let content_type = format!("application/json;g=apidiscovery.k8s.io;v={form};as=APIGroupDiscoveryList");
    let content_type = HeaderValue::try_from(content_type).expect("plain ASCII");
    response.headers_mut().insert(header::CONTENT_TYPE, content_type);
    response
}

fn aggregated_resource(kind: &Kind) -> Value {
    let response_kind =
        |group: &str, version: &str, kind: &str| json!({"group": group, "version": version, "kind": kind});
    let mut resource = json!({
        "resource": kind.plural,
        "responseKind": response_kind(kind.group, kind.version, kind.kind),
        "scope": if kind.namespaced { "Namespaced" } else { "Cluster" },
        "singularResource": kind.singular,
        "verbs": kind.verbs,
    });
    if !kind.short_names.is_empty() {
        resource["shortNames"] = kind.short_names.into();
    }
    if !kind.categories.is_empty() {
        resource["categories"] = kind.categories.into();
    }
    let subresources: Vec<_> = subresources(kind)
        .map(|(name, group, version, sub_kind, verbs)| {
            json!({"subresource": name, "responseKind": response_kind(group, version, sub_kind), "verbs": verbs})
        })
        .collect();
    if !subresources.is_empty() {
        resource["subresources"] = subresources.into();
    }
    resource
}
