//! The patch that a deployment applies to its Function.
//!
//! Three sources, later ones win: the project's manifest, the command's settings, the component. Fields that the
//! manifest had at the last deployment and does not have any more are removed: the last manifest is kept in an
//! annotation, as in kubectl's apply. Fields that no source contains are kept.

use anyhow::Context as _;
use http::Method;
use mayfly_api::{Digest, Function};
use serde_json::{Map, Value, json};

use super::{
    deploy::Settings,
    server::{FIELD_MANAGER, Server, is_not_found, segment, with_query},
};

/// The annotation of a Function with the manifest of its last deployment from a project, as JSON.
const LAST_DEPLOYED: &str = "mayfly.dev/last-deployed";

/// The source of the function's revisions: one of the fields of `spec.source`.
#[derive(Clone, Debug)]
pub(crate) enum DeploySource {
    /// A component in the artifact store.
    Component(Digest),
    /// A component in a registry, which the server pulls.
    Oci(String),
    /// A container image with an HTTP server, and the server's port.
    Image {
        reference: String,
        port: Option<u16>,
        /// Replaces the image's entrypoint; empty: unchanged.
        command: Vec<String>,
        args: Vec<String>,
    },
}

impl DeploySource {
    /// `spec.source`.
    fn field(&self) -> Value {
        match self {
            Self::Component(digest) => json!({"component": digest}),
            Self::Oci(reference) => json!({"oci": reference}),
            Self::Image { reference, port, command, args } => {
                let mut field = json!({"image": reference});
                if let Some(port) = port {
                    field["port"] = json!(port);
                }
                for (name, list) in [("command", command), ("args", args)] {
                    if !list.is_empty() {
                        field[name] = json!(list);
                    }
                }
                field
            }
        }
    }
}

/// One deployment of a Function.
pub(crate) struct DeployPatch<'a> {
    pub(crate) namespace: &'a str,
    pub(crate) name: &'a str,
    pub(crate) source: DeploySource,
    /// The Function from the project's manifest, without a source.
    pub(crate) manifest: Option<&'a Value>,
    pub(crate) settings: &'a Settings,
}

/// The number of attempts before a deployment fails because the function keeps changing.
const ATTEMPTS: u32 = 10;

fn is_conflict(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(kube::Error::Api(status)) if status.code == 409)
}

impl DeployPatch<'_> {
    /// Creates the function, or patches it. Retries if the function was changed between the read and the write, as
    /// controllers do right after a deployment.
    pub(crate) async fn apply(&self, server: &Server) -> anyhow::Result<Function> {
        let mut attempt = 1;
        loop {
            match self.try_apply(server).await {
                Err(error) if is_conflict(&error) && attempt < ATTEMPTS => attempt += 1,
                result => return result,
            }
        }
    }

    async fn try_apply(&self, server: &Server) -> anyhow::Result<Function> {
        let functions = format!("/apis/mayfly.dev/v1/namespaces/{}/functions", segment(self.namespace));
        let query = [("fieldManager", Some(FIELD_MANAGER)), ("fieldValidation", Some("Strict"))];
        let one = format!("{functions}/{}", segment(self.name));
        let answer = match server.get(&one).await {
            Ok(before) => {
                let path = with_query(&one, &query);
                server
                    .send(Method::PATCH, &path, "application/merge-patch+json", &self.patch(&before))
                    .await?
            }
            Err(error) if is_not_found(&error) => {
                let path = with_query(&functions, &query);
                server.send(Method::POST, &path, "application/json", &self.create()).await?
            }
            Err(error) => return Err(error.into()),
        };
        serde_json::from_value(answer.body).context("the server's Function could not be read")
    }

    /// The Function to create.
    fn create(&self) -> Value {
        let mut function = self.fields(&Value::Null);
        let head = json!({"apiVersion": "mayfly.dev/v1", "kind": "Function",
                          "metadata": {"name": self.name, "namespace": self.namespace}});
        overlay(&mut function, &head);
        function
    }

    /// A merge patch of the existing Function.
    fn patch(&self, before: &Value) -> Value {
        let mut patch = json!({});
        if let Some(manifest) = self.manifest {
            let last = before["metadata"]["annotations"][LAST_DEPLOYED].as_str().unwrap_or("{}");
            let last: Value = serde_json::from_str(last).unwrap_or_default();
            removed(&last, manifest, &mut patch);
        }
        overlay(&mut patch, &self.fields(&before["spec"]["env"]));
        for other in ["component", "oci", "image", "port", "command", "args"] {
            let is_set = !patch["spec"]["source"][other].is_null();
            // The port and the program of an image are kept unless the command sets them.
            let is_kept = matches!(other, "port" | "command" | "args")
                && matches!(self.source, DeploySource::Image { .. });
            if !is_set && !is_kept && !before["spec"]["source"][other].is_null() {
                patch["spec"]["source"][other] = Value::Null;
            }
        }
        // The resourceVersion turns a concurrent change into a conflict, instead of overwriting it.
        patch["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"].clone();
        patch
    }

    /// The fields of the three sources. `env_before` are the function's variables: a patch replaces lists, so variables
    /// that are not mentioned are carried over.
    fn fields(&self, env_before: &Value) -> Value {
        let mut said = json!({});
        let mut env_before = env_before;
        if let Some(manifest) = self.manifest {
            let metadata = &manifest["metadata"];
            for field in ["labels", "annotations"] {
                if metadata[field].is_object() {
                    said["metadata"][field] = metadata[field].clone();
                }
            }
            if manifest["spec"].is_object() {
                said["spec"] = manifest["spec"].clone();
            }
            said["metadata"]["annotations"][LAST_DEPLOYED] = manifest.to_string().into();
            if manifest["spec"]["env"].is_array() {
                env_before = &manifest["spec"]["env"];
            }
        }
        overlay(&mut said, &json!({"spec": spec(&self.source, self.settings, env_before)}));
        said
    }
}

/// Adds nulls to `patch` for every member of `last` that is missing in `now`. Lists count as a whole.
fn removed(last: &Value, now: &Value, patch: &mut Value) {
    for (field, last) in last.as_object().into_iter().flatten() {
        match now.get(field) {
            None => patch[field] = Value::Null,
            Some(now) if last.is_object() && now.is_object() => {
                let mut inner = json!({});
                removed(last, now, &mut inner);
                if inner != json!({}) {
                    patch[field] = inner;
                }
            }
            Some(_) => {}
        }
    }
}

/// Merges one patch into another; unlike applying it, nulls stay nulls.
fn overlay(base: &mut Value, top: &Value) {
    match (base, top) {
        (Value::Object(base), Value::Object(top)) => {
            for (field, value) in top {
                overlay(base.entry(field.clone()).or_insert(Value::Null), value);
            }
        }
        (base, top) => *base = top.clone(),
    }
}

/// The fields of a function's spec that the component and the settings determine.
fn spec(source: &DeploySource, settings: &Settings, env_before: &Value) -> Value {
    let mut limits = Map::new();
    let mut scaling = Map::new();
    let mut spec = Map::new();
    let set = |map: &mut Map<String, Value>, field: &str, value: Option<Value>| {
        if let Some(value) = value {
            map.insert(field.into(), value);
        }
    };
    set(&mut limits, "memory", settings.memory.clone().map(Value::from));
    set(&mut limits, "timeout", settings.timeout.map(|span| span.to_string().into()));
    set(&mut limits, "concurrency", settings.concurrency.map(Value::from));
    set(&mut scaling, "min", settings.min.map(Value::from));
    set(&mut scaling, "max", settings.max.map(Value::from));
    set(&mut scaling, "target", settings.target.map(Value::from));
    set(&mut scaling, "idleAfter", settings.idle_after.map(|span| span.to_string().into()));
    spec.insert("source".into(), source.field());
    set(&mut spec, "limits", (!limits.is_empty()).then_some(Value::Object(limits)));
    set(&mut spec, "scaling", (!scaling.is_empty()).then_some(Value::Object(scaling)));
    set(&mut spec, "isolation", settings.isolation.map(|isolation| json!(isolation)));
    set(&mut spec, "egress", (!settings.egress.is_empty()).then(|| settings.egress.clone().into()));
    set(&mut spec, "env", (!settings.env.is_empty()).then(|| merged_env(&settings.env, env_before)));
    Value::Object(spec)
}

/// Variables by name: those of the command replace existing ones.
fn merged_env(said: &[(String, String)], before: &Value) -> Value {
    let mut variables = before.as_array().cloned().unwrap_or_default();
    for (name, value) in said {
        let variable = json!({"name": name, "value": value});
        match variables.iter_mut().find(|known| known["name"] == name.as_str()) {
            Some(known) => *known = variable,
            None => variables.push(variable),
        }
    }
    Value::Array(variables)
}

#[cfg(test)]
mod tests {
    use super::{super::deploy::tests::settings, *};

    fn deploy_patch<'a>(settings: &'a Settings, manifest: Option<&'a Value>) -> DeployPatch<'a> {
        let source = DeploySource::Component(Digest::of(b"x"));
        DeployPatch { namespace: "ns", name: "f", source, manifest, settings }
    }

    fn source() -> Value {
        json!({"component": Digest::of(b"x")})
    }

    #[test]
    fn what_is_not_said_is_not_sent() {
        let metadata = json!({"name": "f", "namespace": "ns"});
        assert_eq!(
            deploy_patch(&settings(&[]), None).create(),
            json!({"apiVersion": "mayfly.dev/v1", "kind": "Function", "metadata": metadata, "spec": {"source": source()}})
        );
        let all = settings(&[
            "--env",
            "A=b=c",
            "--memory",
            "32Mi",
            "--timeout",
            "90s",
            "--min",
            "1",
            "--idle-after",
            "5m",
            "--isolation",
            "reuse",
            "--egress",
            "https://a.example",
            "--egress",
            "http://10.0.0.1:80",
        ]);
        assert_eq!(
            deploy_patch(&all, None).create()["spec"],
            json!({
                "source": source(), "env": [{"name": "A", "value": "b=c"}],
                "limits": {"memory": "32Mi", "timeout": "1m30s"}, "scaling": {"min": 1, "idleAfter": "5m"},
                "isolation": "reuse", "egress": ["https://a.example", "http://10.0.0.1:80"]
            })
        );
    }

    #[test]
    fn a_component_alone_changes_the_source_alone() {
        let before = json!({"metadata": {"resourceVersion": "7"}, "spec": {
            "source": {"image": "x", "port": 80}, "env": [{"name": "A", "value": "1"}], "traffic": [{"latest": true}]}});
        assert_eq!(
            deploy_patch(&settings(&[]), None).patch(&before),
            json!({"metadata": {"resourceVersion": "7"}, "spec": {"source": {
                "component": Digest::of(b"x"), "image": null, "port": null}}})
        );
    }

    #[test]
    fn an_image_takes_the_place_of_a_component() {
        let settings = settings(&[]);
        let image = |port| {
            let source =
                DeploySource::Image { reference: "app:2".into(), port, command: vec![], args: vec![] };
            DeployPatch { source, ..deploy_patch(&settings, None) }
        };
        let before = json!({"metadata": {"resourceVersion": "7"}, "spec": {"source": source()}});
        let patched = image(Some(80)).patch(&before)["spec"]["source"].clone();
        assert_eq!(patched, json!({"image": "app:2", "port": 80, "component": null}));
        let before = json!({"spec": {"source": {"image": "app:1", "port": 80}}});
        let patched = image(None).patch(&before)["spec"]["source"].clone();
        assert_eq!(patched, json!({"image": "app:2"}), "the port stays");
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        let (command, args) = (words(&["/bin/app"]), words(&["-v", "x"]));
        let source = DeploySource::Image { reference: "app:2".into(), port: None, command, args };
        let patched =
            DeployPatch { source, ..deploy_patch(&settings, None) }.patch(&before)["spec"]["source"].clone();
        assert_eq!(patched, json!({"image": "app:2", "command": ["/bin/app"], "args": ["-v", "x"]}));
        let before = json!({"spec": {"source": {"image": "app:1", "command": ["/bin/app"], "args": ["-v"]}}});
        let patched = deploy_patch(&settings, None).patch(&before)["spec"]["source"].clone();
        assert_eq!(patched["command"], Value::Null, "{patched}");
        assert_eq!((patched.get("command"), patched.get("args")), (Some(&Value::Null), Some(&Value::Null)));
    }

    #[test]
    fn variables_that_are_not_mentioned_stay() {
        let before = json!({"spec": {"env": [
            {"name": "A", "value": "1"}, {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s"}}}]}});
        let patch = deploy_patch(&settings(&["-e", "A=2", "-e", "C=3"]), None).patch(&before);
        let expected =
            json!([{"name": "A", "value": "2"}, before["spec"]["env"][1], {"name": "C", "value": "3"}]);
        assert_eq!(patch["spec"]["env"], expected);
    }

    #[test]
    fn what_the_manifest_says_no_more_is_removed() {
        let first = json!({"metadata": {"name": "f", "labels": {"team": "a", "tier": "1"}}, "spec": {
            "env": [{"name": "A", "value": "1"}], "limits": {"memory": "32Mi", "timeout": "5s"}}});
        let made = deploy_patch(&settings(&[]), Some(&first)).create();
        assert_eq!(made["spec"]["limits"], first["spec"]["limits"]);
        assert_eq!(made["metadata"]["labels"], first["metadata"]["labels"]);

        let mut before = made.clone();
        before["spec"]["traffic"] = json!([{"latest": true, "percent": 100}]);
        let second = json!({"metadata": {"name": "f", "labels": {"team": "b"}}, "spec": {
            "limits": {"timeout": "9s"}, "isolation": "reuse"}});
        let mut after = before.clone();
        json_patch::merge(
            &mut after,
            &deploy_patch(&settings(&["--memory", "1Gi"]), Some(&second)).patch(&before),
        );
        assert_eq!(
            after["spec"],
            json!({"source": source(), "limits": {"memory": "1Gi", "timeout": "9s"}, "isolation": "reuse",
                   "traffic": [{"latest": true, "percent": 100}]})
        );
        assert_eq!(after["metadata"]["labels"], json!({"team": "b"}));
        assert_eq!(after["metadata"]["annotations"][LAST_DEPLOYED], second.to_string());
    }

    #[test]
    fn the_command_is_stronger_than_the_manifest() {
        let manifest =
            json!({"metadata": {}, "spec": {"env": [{"name": "A", "value": "1"}], "isolation": "reuse"}});
        let spec = deploy_patch(&settings(&["-e", "B=2", "--isolation", "fresh"]), Some(&manifest)).create()
            ["spec"]
            .clone();
        assert_eq!(spec["env"], json!([{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]));
        assert_eq!(spec["isolation"], "fresh");
    }
}
