//! kubectl's everyday commands on every kind; a row has the specifics of one kind.
//!
//! No controller acts on these objects, so the commands find what they wrote.

mod cluster;
mod storage_and_network;
mod workloads;

use anyhow::{Context as _, Result, ensure};
use futures::future::join_all;
use serde_json::{Value, json};

use crate::kubectl::{Kubectl, kubectl_or_skip};

/// The name of the objects of all rows.
const NAME: &str = "sample";

struct Row {
    /// As in commands.
    kind: &'static str,
    /// As printed by `-o name`.
    resource: &'static str,
    manifest: Value,
    /// The column titles of `get`.
    columns: &'static [&'static str],
    /// A sed script, see [`Kubectl::edit`].
    edit: Change,
    /// A merge patch, or a strategic one if the kind supports it.
    patch: Change,
    /// A change of an immutable field.
    refused: Option<Refused>,
    /// A text in the output of `describe` after all changes.
    described: &'static str,
    /// A field, and its text in `explain`.
    explained: (&'static str, &'static str),
}

/// A change, and the field that shows its effect.
struct Change {
    how: &'static str,
    field: &'static str,
    becomes: &'static str,
}

struct Refused {
    patch: &'static str,
    /// A sed script without effect the second time, because kubectl reopens the editor.
    edit: &'static str,
    why: &'static str,
}

/// Every kind has labels. (Scripts match only YAML; the last applied configuration, which is JSON in the same text, is
/// unchanged.)
const LABEL: Change =
    Change { how: "s/stage:.made/&-edited/", field: "{.metadata.labels.stage}", becomes: "made-edited" };

fn manifest(api_version: &str, kind: &str, rest: Value) -> Value {
    let metadata = json!({"name": NAME, "labels": {"stage": "made"}});
    let mut object = json!({"apiVersion": api_version, "kind": kind, "metadata": metadata});
    if let (Some(object), Value::Object(rest)) = (object.as_object_mut(), rest) {
        object.extend(rest);
    }
    object
}

/// The rows that can be checked in parallel.
fn rows() -> Vec<Row> {
    let mut rows = vec![
        namespace(),
        node(),
        pod(),
        replica_set(),
        config_map(),
        secret(),
        event(),
        lease(),
        function(),
        revision(),
    ];
    rows.extend(workloads::rows());
    rows.extend(storage_and_network::rows());
    rows.extend(cluster::rows());
    rows
}

fn namespace() -> Row {
    Row {
        kind: "namespace",
        resource: "namespace",
        manifest: manifest("v1", "Namespace", json!({})),
        columns: &["NAME", "STATUS", "AGE"],
        edit: LABEL,
        patch: Change {
            how: r#"{"metadata":{"annotations":{"note":"patched"}}}"#,
            field: "{.metadata.annotations.note}",
            becomes: "patched",
        },
        refused: None,
        described: "Active",
        explained: ("namespace.spec.finalizers", "an opaque list of values that must be empty"),
    }
}

/// It never reports its status, so the node controller taints it. No pod is scheduled there.
fn node() -> Row {
    Row {
        kind: "node",
        resource: "node",
        manifest: manifest("v1", "Node", json!({"spec": {"unschedulable": true}})),
        columns: &["NAME", "STATUS", "ROLES", "AGE", "VERSION"],
        edit: LABEL,
        patch: Change {
            how: r#"{"spec":{"providerID":"patched"}}"#,
            field: "{.spec.providerID}",
            becomes: "patched",
        },
        refused: None,
        described: "Unschedulable:",
        explained: ("node.spec.unschedulable", "controls node schedulability of new pods"),
    }
}

/// No node matches its selector, so that it stays pending.
fn pod() -> Row {
    let spec = json!({"nodeSelector": {"sample": "nowhere"},
                      "containers": [{"name": "main", "image": "sample:1"}]});
    Row {
        kind: "pod",
        resource: "pod",
        manifest: manifest("v1", "Pod", json!({"spec": spec})),
        columns: &["NAME", "READY", "STATUS", "RESTARTS", "AGE"],
        edit: LABEL,
        patch: Change {
            how: r#"{"spec":{"containers":[{"name":"main","image":"sample:2"}]}}"#,
            field: "{.spec.containers[0].image}",
            becomes: "sample:2",
        },
        // Most fields of its spec except the image are immutable.
        refused: Some(Refused {
            patch: r#"{"spec":{"restartPolicy":"Never"}}"#,
            edit: "/restartPolicy:/s/Always/Never/",
            why: "pod updates may not change fields other than",
        }),
        described: "sample=nowhere",
        explained: ("pod.spec.nodeSelector", "a selector which must be true for the pod to fit on a node"),
    }
}

/// Without replicas, so that no pods come and go.
fn replica_set() -> Row {
    let template = json!({"metadata": {"labels": {"app": "sample"}},
                          "spec": {"containers": [{"name": "main", "image": "sample:1"}]}});
    let spec = json!({"replicas": 0, "selector": {"matchLabels": {"app": "sample"}}, "template": template});
    Row {
        kind: "replicaset",
        resource: "replicaset.apps",
        manifest: manifest("apps/v1", "ReplicaSet", json!({"spec": spec})),
        columns: &["NAME", "DESIRED", "CURRENT", "READY", "AGE"],
        edit: Change {
            how: "s/image:.sample:1/&2/",
            field: "{.spec.template.spec.containers[0].image}",
            becomes: "sample:12",
        },
        patch: Change {
            how: r#"{"spec":{"minReadySeconds":7}}"#,
            field: "{.spec.minReadySeconds}",
            becomes: "7",
        },
        refused: Some(Refused {
            patch: r#"{"spec":{"selector":{"matchLabels":{"app":"other"}}}}"#,
            // Also changes the template's labels, which must match.
            edit: "s/app:.sample$/&-other/",
            why: "field is immutable",
        }),
        described: "0 current / 0 desired",
        explained: ("replicaset.spec.minReadySeconds", "Minimum number of seconds"),
    }
}

fn config_map() -> Row {
    Row {
        kind: "configmap",
        resource: "configmap",
        manifest: manifest("v1", "ConfigMap", json!({"data": {"colour": "blue"}})),
        columns: &["NAME", "DATA", "AGE"],
        edit: Change { how: "s/colour:.blue/&-green/", field: "{.data.colour}", becomes: "blue-green" },
        patch: Change { how: r#"{"data":{"colour":"red"}}"#, field: "{.data.colour}", becomes: "red" },
        refused: None,
        described: "colour:",
        explained: ("configmap.data", "Data contains the configuration data"),
    }
}

/// Blue, green and red in base64.
fn secret() -> Row {
    Row {
        kind: "secret",
        resource: "secret",
        manifest: manifest("v1", "Secret", json!({"data": {"colour": "Ymx1ZQ=="}})),
        columns: &["NAME", "TYPE", "DATA", "AGE"],
        edit: Change {
            how: "/colour:.Ymx1ZQ==/s/Ymx1ZQ==/Z3JlZW4=/",
            field: "{.data.colour}",
            becomes: "Z3JlZW4=",
        },
        patch: Change { how: r#"{"stringData":{"colour":"red"}}"#, field: "{.data.colour}", becomes: "cmVk" },
        refused: Some(Refused {
            patch: r#"{"type":"other"}"#,
            edit: "/^type:/s/Opaque/other/",
            why: "field is immutable",
        }),
        described: "Opaque",
        explained: ("secret.stringData", "allows specifying non-binary secret data in string form"),
    }
}

/// Its line begins with its age, and does not contain its name.
fn event() -> Row {
    let about = json!({"apiVersion": "v1", "kind": "ConfigMap", "name": "nothing", "namespace": "default"});
    let event =
        json!({"type": "Normal", "reason": "Tested", "message": "nothing was", "involvedObject": about});
    Row {
        kind: "event",
        resource: "event",
        manifest: manifest("v1", "Event", event),
        columns: &["LAST SEEN", "TYPE", "REASON", "OBJECT", "MESSAGE"],
        edit: Change { how: "s/reason:.Tested/&Again/", field: "{.reason}", becomes: "TestedAgain" },
        patch: Change { how: r#"{"count":7}"#, field: "{.count}", becomes: "7" },
        refused: None,
        described: "TestedAgain",
        explained: ("event.message", "A human-readable description of the status of this operation"),
    }
}

fn lease() -> Row {
    let spec = json!({"holderIdentity": "first", "leaseDurationSeconds": 60});
    Row {
        kind: "lease",
        resource: "lease.coordination.k8s.io",
        manifest: manifest("coordination.k8s.io/v1", "Lease", json!({"spec": spec})),
        columns: &["NAME", "HOLDER", "AGE"],
        edit: Change {
            how: "s/holderIdentity:.first/&-still/",
            field: "{.spec.holderIdentity}",
            becomes: "first-still",
        },
        patch: Change {
            how: r#"{"spec":{"holderIdentity":"second"}}"#,
            field: "{.spec.holderIdentity}",
            becomes: "second",
        },
        refused: Some(Refused {
            patch: r#"{"spec":{"leaseDurationSeconds":0}}"#,
            edit: "/leaseDurationSeconds:/s/60/0/",
            why: "must be greater than 0",
        }),
        described: "second",
        explained: (
            "lease.spec.holderIdentity",
            "holderIdentity contains the identity of the holder of a current lease",
        ),
    }
}

/// Its component does not exist, so that it has no replica.
fn function() -> Row {
    let spec = json!({"source": {"component": mayfly_e2e::digest_of(b"nowhere")}, "isolation": "fresh"});
    Row {
        kind: "function",
        resource: "function.mayfly.dev",
        manifest: manifest("mayfly.dev/v1", "Function", json!({"spec": spec})),
        columns: &["NAME", "URL", "LATEST", "READY", "REPLICAS", "AGE"],
        edit: Change { how: "/isolation:/s/fresh/reuse/", field: "{.spec.isolation}", becomes: "reuse" },
        patch: Change {
            how: r#"{"spec":{"scaling":{"max":5}}}"#,
            field: "{.spec.scaling.max}",
            becomes: "5",
        },
        refused: Some(Refused {
            patch: r#"{"spec":{"scaling":{"min":9}}}"#,
            edit: "/min:/s/0/9/",
            why: "spec.scaling.min: Invalid value",
        }),
        described: "reuse",
        explained: ("function.spec.egress", "Outbound HTTP is denied unless listed"),
    }
}

/// The revision of a missing function: no controller adopts it. Its spec is immutable.
fn revision() -> Row {
    let source = json!({"component": mayfly_e2e::digest_of(b"nowhere")});
    let spec = json!({"function": "nobody", "source": source, "isolation": "fresh"});
    Row {
        kind: "revision",
        resource: "revision.mayfly.dev",
        manifest: manifest("mayfly.dev/v1", "Revision", json!({"spec": spec})),
        columns: &["NAME", "FUNCTION", "READY", "REPLICAS", "AGE"],
        edit: LABEL,
        patch: Change {
            how: r#"{"metadata":{"labels":{"stage":"patched"}}}"#,
            field: "{.metadata.labels.stage}",
            becomes: "patched",
        },
        refused: Some(Refused {
            patch: r#"{"spec":{"isolation":"reuse"}}"#,
            edit: "/isolation:/s/fresh/reuse/",
            why: "field is immutable",
        }),
        described: "nobody",
        explained: ("revision.spec.function", "The function this is a state of"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_kind_is_made_shown_changed_and_deleted() -> Result<()> {
    let kubectl = kubectl_or_skip!();
    let (kubectl, rows) = (&kubectl, rows());
    // In parallel: starting kubectl takes most of the time.
    let checks = rows.iter().map(|row| async move { row.check(kubectl).await.context(row.kind) });
    let all = join_all(checks).await;
    let failed: Vec<_> =
        all.into_iter().filter_map(Result::err).map(|error| format!("{error:#}\n")).collect();
    ensure!(failed.is_empty(), "{}", failed.concat());
    // They belong to the Service of their name, and are removed with it.
    storage_and_network::endpoints().check(kubectl).await?;
    Ok(())
}

impl Row {
    async fn check(&self, kubectl: &Kubectl) -> Result<()> {
        let file = kubectl.file(&format!("{}.json", self.kind), &self.manifest)?;
        let created = kubectl.ok(&["create", "-f", &file]).await?;
        ensure!(created.trim() == self.said("created"), "{created}");
        self.is_listed(kubectl).await?;
        // The first apply records its configuration.
        let noted = kubectl.ok(&["apply", "-f", &file]).await?;
        ensure!(noted.trim() == self.said("configured"), "{noted}");
        let again = kubectl.ok(&["apply", "-f", &file]).await?;
        // The selector of a budget is replaced by each patch, so that kubectl always sends one.
        let expected = if self.kind == "poddisruptionbudget" { "configured" } else { "unchanged" };
        ensure!(again.trim() == self.said(expected), "{again}");
        self.changes(kubectl).await?;
        if let Some(refused) = &self.refused {
            self.refuses(kubectl, refused).await?;
        }
        self.is_told_of(kubectl).await?;
        self.goes(kubectl).await
    }

    /// kubectl's confirmation of an action.
    fn said(&self, what: &str) -> String {
        format!("{}/{NAME} {what}", self.resource)
    }

    async fn is_listed(&self, kubectl: &Kubectl) -> Result<()> {
        let table = kubectl.ok(&["get", self.kind, NAME]).await?;
        let head = table.lines().next().unwrap_or_default();
        // Titles contain single spaces, and are separated by at least three.
        let columns: Vec<_> = head.split("   ").map(str::trim).filter(|title| !title.is_empty()).collect();
        ensure!(columns == self.columns && table.lines().count() == 2, "{table}");
        let names = kubectl.ok(&["get", self.kind, "-o", "name"]).await?;
        ensure!(names.lines().any(|name| name == format!("{}/{NAME}", self.resource)), "{names}");
        Ok(())
    }

    /// Edits and patches it, and watches that.
    async fn changes(&self, kubectl: &Kubectl) -> Result<()> {
        let Self { kind, edit, patch, .. } = self;
        // Watches a list of one object: a watch by name may miss the first events.
        let selector = format!("metadata.name={NAME}");
        let shown = format!("jsonpath={}|{}{{\"\\n\"}}", edit.field, patch.field);
        let mut watch =
            kubectl.start(&["get", kind, "--field-selector", &selector, "--watch", "-o", &shown])?;
        watch.line("of how it was", |_| true).await?;

        let edited = kubectl.edit(kind, NAME, edit.how).await?;
        ensure!(edited.code == Some(0) && edited.stdout.trim() == self.said("edited"), "{edited:?}");
        let seen = format!("{}|", edit.becomes);
        watch.line("of the edit", |line| line.starts_with(&seen)).await?;

        let patched =
            kubectl.ok(&["patch", kind, NAME, "--type", self.patch_type(), "-p", patch.how]).await?;
        ensure!(patched.trim() == self.said("patched"), "{patched}");
        let seen = format!("|{}", patch.becomes);
        watch.line("of the patch", |line| line.ends_with(&seen)).await?;

        let condition = format!("--for=jsonpath={}={}", patch.field, patch.becomes);
        kubectl.ok(&["wait", &condition, &format!("{kind}/{NAME}"), "--timeout=60s"]).await?;
        Ok(())
    }

    /// kubectl treats Mayfly's own kinds like custom resources.
    fn patch_type(&self) -> &'static str {
        if self.resource.ends_with(".mayfly.dev") { "merge" } else { "strategic" }
    }

    async fn refuses(&self, kubectl: &Kubectl, refused: &Refused) -> Result<()> {
        let patch = ["patch", self.kind, NAME, "--type", self.patch_type(), "-p", refused.patch];
        let patched = kubectl.run(&patch).await?;
        ensure!(patched.code == Some(1) && patched.stderr.contains(refused.why), "{patched:?}");
        let edited = kubectl.edit(self.kind, NAME, refused.edit).await?;
        ensure!(edited.code == Some(1) && edited.stderr.contains("is invalid"), "{edited:?}");
        // The editor was reopened with the reason at the top; kubectl keeps that file and prints its name.
        let kept = edited.stderr.lines().find(|line| line.contains("has been stored to"));
        let kept = kept.and_then(|line| line.split('"').nth(1)).context("nothing was kept")?;
        let kept = std::fs::read_to_string(kept)?;
        ensure!(kept.contains(refused.why), "{kept}");
        Ok(())
    }

    async fn is_told_of(&self, kubectl: &Kubectl) -> Result<()> {
        let described = kubectl.ok(&["describe", self.kind, NAME]).await?;
        ensure!(described.contains(self.described), "{described}");
        let (field, words) = self.explained;
        let explained = kubectl.ok(&["explain", field]).await?;
        // Its lines are wrapped.
        let explained = explained.split_whitespace().collect::<Vec<_>>().join(" ");
        ensure!(explained.contains(words), "{explained}");
        Ok(())
    }

    async fn goes(&self, kubectl: &Kubectl) -> Result<()> {
        let object = format!("{}/{NAME}", self.kind);
        let wait = ["wait", "--for=delete", object.as_str(), "--timeout=60s"];
        let delete = ["delete", self.kind, NAME];
        tokio::try_join!(kubectl.ok(&wait), kubectl.ok(&delete))?;
        let gone = kubectl.run(&["get", self.kind, NAME]).await?;
        ensure!(gone.code == Some(1) && gone.stderr.contains("NotFound"), "{gone:?}");
        Ok(())
    }
}
