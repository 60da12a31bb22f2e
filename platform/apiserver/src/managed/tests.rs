//! Ownership and apply, as scripts of writes.

use serde_json::{Value, json};

use super::*;
use crate::{registry::registry, request::FieldValidation, verbs::Manager};

/// An object that is written by several managers in turn.
struct Script {
    kind: &'static Kind,
    live: Option<Object>,
    clock: i64,
}

impl Script {
    fn new(kind: &str) -> Self {
        let kind = registry().kinds().find(|row| row.kind == kind).unwrap();
        Self { kind, live: None, clock: 0 }
    }

    fn request(&mut self, manager: &str) -> WriteRequest {
        self.clock += 1;
        WriteRequest {
            kind: self.kind,
            namespace: "default".into(),
            now: Timestamp::from_second(self.clock).unwrap(),
            dry_run: false,
            validation: FieldValidation::Strict,
            manager: Manager { name: manager.into(), explicit: true, tracked: true },
            user: crate::access::User::in_process("test"),
        }
    }

    fn object(&self, body: Value) -> Object {
        let mut object = Object(body.as_object().unwrap().clone());
        object.0.insert("apiVersion".into(), self.kind.api_version().into());
        object.0.insert("kind".into(), self.kind.kind.into());
        object.meta_mut().insert("name".into(), "x".into());
        object
    }

    fn apply(&mut self, manager: &str, body: Value, force: bool) -> Result<(), ApiError> {
        let (request, applied) = (self.request(manager), self.object(body));
        let live = apply(&request, Part::Main, self.live.as_ref(), &applied, force)?;
        self.live = Some(live);
        Ok(())
    }

    /// A write that replaces everything but metadata.managedFields.
    fn update(&mut self, manager: &str, body: Value) {
        let (request, mut new) = (self.request(manager), self.object(body));
        write(&request, &mut new, self.live.as_ref());
        self.live = Some(new);
    }

    fn at(&self, pointer: &str) -> Value {
        let value = Value::Object(self.live.clone().unwrap().0);
        value.pointer(pointer).cloned().unwrap_or_default()
    }

    fn owns(&self, manager: &str) -> Vec<String> {
        let entries = entries_of(self.live.as_ref().unwrap()).unwrap_or_default();
        entries
            .iter()
            .filter(|entry| entry.manager == manager)
            .flat_map(|entry| entry.fields.paths())
            .collect()
    }
}

/// Tracks a write of an object whose defaults are filled in.
fn write(request: &WriteRequest, new: &mut Object, old: Option<&Object>) {
    let sent = new.meta_mut().get(MANAGED_FIELDS).cloned().unwrap_or_default();
    let entries = entries_after(request, Part::Main, new, &sent, old);
    store(new, entries.unwrap_or_default());
}

fn message(result: Result<(), ApiError>) -> String {
    result.unwrap_err().message
}

#[test]
fn an_applied_object_is_owned_and_what_is_no_longer_applied_goes() {
    let mut script = Script::new("ConfigMap");
    script.apply("me", json!({"data": {"a": "1", "b": "2"}}), false).unwrap();
    assert_eq!(script.owns("me"), [".data.a", ".data.b"]);
    script.apply("me", json!({"data": {"b": "3"}}), false).unwrap();
    assert_eq!(script.at("/data"), json!({"b": "3"}));
    let before = script.live.clone();
    script.apply("me", json!({"data": {"b": "3"}}), false).unwrap();
    assert_eq!(script.live, before, "the time of the entry stands, nothing changed");
    script.apply("me", json!({}), false).unwrap();
    assert_eq!(script.at("/data"), Value::Null);
}

#[test]
fn a_field_that_becomes_zero_is_a_conflict_too() {
    let mut script = Script::new("Node");
    script.apply("me", json!({"spec": {"unschedulable": true}}), false).unwrap();
    assert_eq!(
        message(script.apply("you", json!({"spec": {"unschedulable": false}}), false)),
        "Apply failed with 1 conflict: conflict with \"me\": .spec.unschedulable"
    );
}

#[test]
fn others_fields_are_conflicts_until_forced() {
    let mut script = Script::new("ConfigMap");
    script.apply("me", json!({"data": {"a": "1"}}), false).unwrap();
    assert_eq!(
        message(script.apply("you", json!({"data": {"a": "2"}}), false)),
        "Apply failed with 1 conflict: conflict with \"me\": .data.a"
    );
    script.apply("you", json!({"data": {"a": "1", "b": "1"}}), false).unwrap();
    assert_eq!(
        (script.owns("me"), script.owns("you")),
        (vec![".data.a".to_owned()], vec![".data.a".to_owned(), ".data.b".to_owned()]),
        "the same value is shared"
    );
    script.apply("you", json!({"data": {"a": "2"}}), true).unwrap();
    assert_eq!((script.at("/data"), script.owns("me").len()), (json!({"a": "2"}), 0));
}

#[test]
fn shared_fields_stay_while_one_manager_applies_them() {
    let mut script = Script::new("ConfigMap");
    script.apply("me", json!({"data": {"a": "1", "b": "2"}}), false).unwrap();
    script.apply("you", json!({"data": {"a": "1"}}), false).unwrap();
    script.apply("me", json!({"data": {"b": "2"}}), false).unwrap();
    assert_eq!(script.at("/data"), json!({"a": "1", "b": "2"}));
    script.apply("you", json!({}), false).unwrap();
    assert_eq!(script.at("/data"), json!({"b": "2"}));
}

#[test]
fn updates_take_fields_over() {
    let mut script = Script::new("ConfigMap");
    script.apply("me", json!({"data": {"a": "1", "b": "2"}}), false).unwrap();
    script.update("editor", json!({"data": {"a": "9", "c": "3"}}));
    assert_eq!(
        (script.owns("me").len(), script.owns("editor")),
        (0, vec![".data.a".to_owned(), ".data.c".to_owned()])
    );
    let text = message(script.apply("me", json!({"data": {"a": "1", "c": "1"}}), false));
    assert_eq!(
        text,
        "Apply failed with 2 conflicts: conflicts with \"editor\" using v1 at 1970-01-01T00:00:02Z:\n- .data.a\n- .data.c"
    );
}

#[test]
fn items_of_lists_have_owners_of_their_own() {
    let mut script = Script::new("Pod");
    let container = |name: &str, image: &str| json!({"name": name, "image": image});
    script.apply("me", json!({"spec": {"containers": [container("a", "x")]}}), false).unwrap();
    script.apply("sidecar", json!({"spec": {"containers": [container("s", "y")]}}), false).unwrap();
    assert_eq!(script.at("/spec/containers/0/name"), "a", "live items keep their place");
    assert_eq!(
        script.owns("sidecar"),
        [
            ".spec.containers[name=\"s\"]",
            ".spec.containers[name=\"s\"].image",
            ".spec.containers[name=\"s\"].name"
        ]
    );
    script.apply("me", json!({"spec": {"containers": [container("b", "z")]}}), false).unwrap();
    let names: Vec<_> =
        script.at("/spec/containers").as_array().unwrap().iter().map(|c| c["name"].clone()).collect();
    assert_eq!(names, ["s", "b"]);
    let text = message(script.apply("me", json!({"spec": {"containers": [container("s", "other")]}}), false));
    assert_eq!(
        text,
        "Apply failed with 1 conflict: conflict with \"sidecar\": .spec.containers[name=\"s\"].image"
    );
}

#[test]
fn a_removed_item_takes_unowned_fields_along() {
    let mut script = Script::new("Pod");
    script
        .apply(
            "me",
            json!({"spec": {"containers": [{"name": "a", "image": "x"}, {"name": "b", "image": "y"}]}}),
            false,
        )
        .unwrap();
    // Defaults, which have no owner.
    let mut live = script.live.clone().unwrap();
    live.0["spec"]["containers"][1]["imagePullPolicy"] = json!("Always");
    script.live = Some(live);
    script.apply("me", json!({"spec": {"containers": [{"name": "a", "image": "x"}]}}), false).unwrap();
    assert_eq!(script.at("/spec/containers"), json!([{"name": "a", "image": "x"}]));
}

#[test]
fn ports_are_told_apart_by_number_and_protocol() {
    let mut script = Script::new("Pod");
    let spec = |ports: Value| json!({"spec": {"containers": [{"name": "a", "image": "x", "ports": ports}]}});
    script.apply("me", spec(json!([{"containerPort": 53}])), false).unwrap();
    let mut live = script.live.clone().unwrap();
    live.0["spec"]["containers"][0]["ports"][0]["protocol"] = json!("TCP");
    script.live = Some(live);
    script
        .apply("me", spec(json!([{"containerPort": 53}, {"containerPort": 53, "protocol": "UDP"}])), false)
        .unwrap();
    assert_eq!(
        script.at("/spec/containers/0/ports"),
        json!([{"containerPort": 53, "protocol": "TCP"}, {"containerPort": 53, "protocol": "UDP"}])
    );
}

#[test]
fn sets_and_atomic_values() {
    let mut script = Script::new("Pod");
    script
        .apply(
            "me",
            json!({"metadata": {"finalizers": ["e.com/a"]}, "spec": {"nodeSelector": {"a": "1"}}}),
            false,
        )
        .unwrap();
    script.apply("you", json!({"metadata": {"finalizers": ["e.com/b"]}}), false).unwrap();
    assert_eq!(script.at("/metadata/finalizers"), json!(["e.com/a", "e.com/b"]));
    script.apply("me", json!({"spec": {"nodeSelector": {"b": "1"}}}), false).unwrap();
    assert_eq!(script.at("/metadata/finalizers"), json!(["e.com/b"]));
    assert_eq!(script.at("/spec/nodeSelector"), json!({"b": "1"}), "an atomic map is replaced");
    assert_eq!(script.owns("me"), [".spec.nodeSelector"]);
}

#[test]
fn what_was_there_before_the_first_apply_has_an_owner() {
    let mut script = Script::new("ConfigMap");
    script.live = Some(script.object(json!({"data": {"a": "1", "b": "2"}})));
    let text = message(script.apply("me", json!({"data": {"a": "9"}}), false));
    assert!(
        text.starts_with("Apply failed with 1 conflict: conflict with \"before-first-apply\" using v1"),
        "{text}"
    );
    script.apply("me", json!({"data": {"a": "1"}}), false).unwrap();
    assert_eq!(script.owns("before-first-apply"), [".data", ".data.a", ".data.b"]);
}

#[test]
fn untracked_objects_stay_untracked_until_someone_names_himself() {
    let mut script = Script::new("ConfigMap");
    let mut request = script.request("controller");
    request.manager.tracked = false;
    let mut object = script.object(json!({"data": {"a": "1"}}));
    write(&request, &mut object, None);
    assert_eq!(entries_of(&object), None);
    script.update("kubectl-create", json!({"data": {"a": "1"}}));
    assert_eq!(script.owns("kubectl-create"), [".data", ".data.a"]);
    let mut reset = script.live.clone().unwrap();
    reset.meta_mut().insert(MANAGED_FIELDS.into(), json!([{}]));
    write(&script.request("x"), &mut reset, script.live.clone().as_ref());
    assert_eq!(entries_of(&reset), None);
}

#[test]
fn many_managers_are_put_together() {
    let mut script = Script::new("ConfigMap");
    let mut data = serde_json::Map::new();
    for n in 0..20 {
        data.insert(format!("k{n:02}"), json!("v"));
        script.update(&format!("m{n:02}"), json!({"data": data}));
    }
    let entries = entries_of(script.live.as_ref().unwrap()).unwrap();
    assert_eq!(entries.len(), UPDATE_MANAGERS_MAX);
    // The map itself, and the keys of the managers that were merged.
    assert_eq!(script.owns(ANCIENT_CHANGES).len(), 1 + 20 - (UPDATE_MANAGERS_MAX - 1));
}

mod properties {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::{collection::btree_map, prelude::*};

    use super::*;

    /// A sequence of applies by managers.
    fn writes() -> impl Strategy<Value = Vec<(usize, BTreeMap<String, String>)>> {
        let data = btree_map("[a-d]", "[12]", 0..4);
        proptest::collection::vec((0..3usize, data), 1..12)
    }

    proptest! {
        /// With force: applied fields are present, fields without an applier are removed, and a second apply changes
        /// nothing.
        #[test]
        fn forced_applies_are_a_union_of_what_is_wanted(writes in writes()) {
            let mut script = Script::new("ConfigMap");
            let mut wanted: [BTreeMap<String, String>; 3] = Default::default();
            for (manager, data) in writes {
                let name = format!("m{manager}");
                script.apply(&name, json!({"data": data}), true).unwrap();
                // Another value takes the key from the other owners.
                for (other, theirs) in wanted.iter_mut().enumerate() {
                    theirs.retain(|key, value| other == manager || data.get(key).is_none_or(|new| new == value));
                }
                wanted[manager] = data.clone();
                let union: BTreeMap<_, _> = wanted.iter().flatten().collect();
                let found = script.at("/data");
                let found: BTreeMap<String, String> = serde_json::from_value(found).unwrap_or_default();
                prop_assert_eq!(found.iter().collect::<BTreeMap<_, _>>(), union);
                let owned: BTreeSet<_> = script.owns(&name).into_iter().filter(|path| path != ".data").collect();
                prop_assert_eq!(owned, data.keys().map(|key| format!(".data.{key}")).collect::<BTreeSet<_>>());
                let before = script.live.clone();
                script.apply(&name, json!({"data": data}), false).unwrap();
                prop_assert_eq!(&script.live, &before);
            }
        }
    }
}

#[test]
fn a_manager_that_applies_another_version_does_not_conflict_with_itself() {
    let mut script = Script::new("HorizontalPodAutoscaler");
    let of_version = |version| registry().find("autoscaling", version, "horizontalpodautoscalers").unwrap();
    let body = |most: i32| json!({"spec": {"maxReplicas": most}});
    script.kind = of_version("v1");
    script.apply("deployer", body(3), false).unwrap();
    script.kind = of_version("v2");
    script.apply("deployer", body(4), false).unwrap();
    let entries = entries_of(script.live.as_ref().unwrap()).unwrap();
    let found: Vec<_> =
        entries.iter().map(|entry| (entry.manager.as_str(), entry.api_version.as_str())).collect();
    assert_eq!(found, [("deployer", "autoscaling/v2")]);
    // Another manager still conflicts.
    assert!(script.apply("other", body(5), false).is_err());
}
