//! The objects of the store as the checks see them: a copy that follows every event.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use mayfly_store::{EventKind, Key, WriteEvent};
use serde_json::Value;

/// One event of the store, decoded. The model is that of the moment before it.
#[derive(Debug)]
pub struct Step {
    /// Since the beginning of the run.
    pub at: Duration,
    pub revision: u64,
    pub key: Key,
    /// Absent for a creation.
    pub old: Option<Arc<Value>>,
    /// Absent for a deletion.
    pub new: Option<Arc<Value>>,
}

/// All objects, with indexes by uid and by owner.
#[derive(Debug, Default)]
pub struct Model {
    objects: BTreeMap<Key, Arc<Value>>,
    by_uid: BTreeMap<String, Key>,
    by_owner: BTreeMap<String, BTreeSet<Key>>,
}

impl Step {
    /// The step of an event; an object that is no JSON counts as empty.
    pub fn of(at: Duration, event: &WriteEvent, model: &Model) -> Self {
        let key = event.entry.key.clone();
        let value = || Arc::new(serde_json::from_slice(&event.entry.value).unwrap_or_default());
        let new = (event.kind != EventKind::Deleted).then(value);
        Self { at, revision: event.revision.0, old: model.objects.get(&key).cloned(), key, new }
    }

    pub fn resource(&self) -> &str {
        &self.key.resource
    }

    /// The object after the step; of a deletion, before it.
    pub fn latest(&self) -> &Value {
        self.new.as_deref().or(self.old.as_deref()).unwrap_or(&Value::Null)
    }

    /// The object that this step creates.
    pub fn created(&self) -> Option<&Value> {
        self.old.is_none().then_some(self.new.as_deref()).flatten()
    }

    /// The object before and after a change.
    pub fn changed(&self) -> Option<(&Value, &Value)> {
        Some((self.old.as_deref()?, self.new.as_deref()?))
    }

    /// The last state of the object that this step removes.
    pub fn removed(&self) -> Option<&Value> {
        self.new.is_none().then_some(self.old.as_deref()).flatten()
    }

    /// The state of an object whose deletion begins with this step: it is marked or removed at once.
    pub fn deletion_begins(&self) -> Option<&Value> {
        let old = self.old.as_deref().filter(|old| !is_terminating(old))?;
        self.new.as_deref().is_none_or(is_terminating).then_some(old)
    }
}

impl Model {
    pub fn apply(&mut self, step: &Step) {
        if let Some(old) = &step.old {
            for owner in owners(old) {
                if let Some(dependents) = self.by_owner.get_mut(text(owner, "/uid")) {
                    dependents.remove(&step.key);
                }
            }
            self.by_uid.remove(uid(old));
            self.objects.remove(&step.key);
        }
        if let Some(new) = &step.new {
            for owner in owners(new) {
                let owner = text(owner, "/uid").to_owned();
                self.by_owner.entry(owner).or_default().insert(step.key.clone());
            }
            self.by_uid.insert(uid(new).to_owned(), step.key.clone());
            self.objects.insert(step.key.clone(), new.clone());
        }
    }

    pub fn get(&self, key: &Key) -> Option<&Value> {
        self.objects.get(key).map(|object| &**object)
    }

    /// An object by resource, namespace and name.
    pub fn named(&self, resource: &str, namespace: &str, name: &str) -> Option<&Value> {
        self.get(&Key::new(resource, namespace, name))
    }

    pub fn by_uid(&self, uid: &str) -> Option<(&Key, &Value)> {
        let key = self.by_uid.get(uid)?;
        Some((key, self.get(key)?))
    }

    pub fn all(&self) -> impl Iterator<Item = (&Key, &Value)> {
        self.objects.iter().map(|(key, object)| (key, &**object))
    }

    /// The objects of a resource, in the order of namespaces and names.
    pub fn of<'a>(&'a self, resource: &'a str) -> impl Iterator<Item = (&'a Key, &'a Value)> {
        let from = Key::new(resource, "", "");
        let range = self.objects.range(from..).take_while(move |(key, _)| &*key.resource == resource);
        range.map(|(key, object)| (key, &**object))
    }

    /// The objects with an owner reference to this uid.
    pub fn dependents<'a>(&'a self, owner: &str) -> impl Iterator<Item = (&'a Key, &'a Value)> + use<'a> {
        let keys = self.by_owner.get(owner).into_iter().flatten();
        keys.filter_map(|key| Some((key, self.get(key)?)))
    }

    /// The objects of a resource whose controller has this uid.
    pub fn controlled<'a>(
        &'a self,
        resource: &'a str,
        owner: &'a str,
    ) -> impl Iterator<Item = (&'a Key, &'a Value)> {
        let dependents = self.dependents(owner).filter(move |(key, _)| &*key.resource == resource);
        dependents.filter(move |(_, object)| {
            controller(object).is_some_and(|controller| text(controller, "/uid") == owner)
        })
    }
}

/// The text at a JSON pointer; empty when absent.
pub fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object.pointer(pointer).and_then(Value::as_str).unwrap_or("")
}

/// The number at a JSON pointer; `absent` when there is none.
pub fn number(object: &Value, pointer: &str, absent: i64) -> i64 {
    object.pointer(pointer).and_then(Value::as_i64).unwrap_or(absent)
}

/// The list at a JSON pointer; empty when absent.
pub fn list<'a>(object: &'a Value, pointer: &str) -> &'a [Value] {
    object.pointer(pointer).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

pub fn uid(object: &Value) -> &str {
    text(object, "/metadata/uid")
}

pub fn owners(object: &Value) -> &[Value] {
    list(object, "/metadata/ownerReferences")
}

/// The owner reference of the object's controller.
pub fn controller(object: &Value) -> Option<&Value> {
    owners(object).iter().find(|owner| owner["controller"] == true)
}

pub fn finalizers(object: &Value) -> impl Iterator<Item = &str> {
    list(object, "/metadata/finalizers").iter().filter_map(Value::as_str)
}

pub fn is_terminating(object: &Value) -> bool {
    !text(object, "/metadata/deletionTimestamp").is_empty()
}

/// The status of a condition; empty when absent.
pub fn condition<'a>(object: &'a Value, kind: &str) -> &'a str {
    let conditions = list(object, "/status/conditions");
    conditions.iter().find(|condition| condition["type"] == kind).map_or("", |found| text(found, "/status"))
}

pub fn is_finished(pod: &Value) -> bool {
    matches!(text(pod, "/status/phase"), "Succeeded" | "Failed")
}

/// A pod that counts as one of its owner's: neither finished nor being deleted.
pub fn is_active(pod: &Value) -> bool {
    !is_finished(pod) && !is_terminating(pod)
}

pub fn is_ready(pod: &Value) -> bool {
    is_active(pod) && condition(pod, "Ready") == "True"
}
