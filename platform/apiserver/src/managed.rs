//! The owners of fields (`metadata.managedFields`), and server-side apply.
//!
//! The rules are those of upstream's `apimachinery/pkg/util/managedfields` and of structured-merge-diff's
//! `merge.Updater`. An object is tracked once a client creates it with a `fieldManager` (as kubectl does) or applies
//! it; nodes are tracked always. Before that no owners are computed; at the first apply the earlier fields belong to
//! `before-first-apply`.

mod declared;
mod set;
mod typed;

use jiff::Timestamp;
use mayfly_api::wellknown::ANNOTATION_LAST_APPLIED;
use serde_json::{Map, Value};
use set::FieldSet;
use typed::Shape;

use crate::{
    object::{Object, map_at},
    registry::Kind,
    schema::{schemas, wire::canonicalise_sent},
    status::ApiError,
    verbs::{Part, WriteRequest},
};

const MANAGED_FIELDS: &str = "managedFields";
const BEFORE_FIRST_APPLY: &str = "before-first-apply";
const ANCIENT_CHANGES: &str = "ancient-changes";
/// The manager's name of `kubectl apply --server-side`.
const KUBECTL: &str = "kubectl";
/// Maximum number of managers that update; older ones are merged (upstream's `DefaultMaxUpdateManagers`).
const UPDATE_MANAGERS_MAX: usize = 10;
/// Metadata without field owners: the server sets them.
const OWN_METADATA: [&str; 9] = [
    "f:name",
    "f:namespace",
    "f:creationTimestamp",
    "f:selfLink",
    "f:uid",
    "f:generation",
    "f:managedFields",
    "f:resourceVersion",
    "f:deletionTimestamp",
];

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Operation {
    Apply,
    Update,
}

/// One entry of `managedFields`.
#[derive(Clone, Debug, PartialEq)]
struct Entry {
    manager: String,
    operation: Operation,
    api_version: String,
    subresource: String,
    time: Option<String>,
    fields: FieldSet,
}

impl Entry {
    fn decode(value: &Value) -> Option<Self> {
        let text = |key: &str| value[key].as_str().unwrap_or("").to_owned();
        let operation = match value["operation"].as_str()? {
            "Apply" => Operation::Apply,
            "Update" => Operation::Update,
            _ => return None,
        };
        Some(Self {
            manager: text("manager"),
            operation,
            api_version: text("apiVersion"),
            subresource: text("subresource"),
            time: value["time"].as_str().map(str::to_owned),
            fields: FieldSet::from_json(&value["fieldsV1"]),
        })
    }

    fn encode(self) -> Value {
        let operation = if self.operation == Operation::Apply { "Apply" } else { "Update" };
        let fields = [
            ("manager", self.manager.into()),
            ("operation", operation.into()),
            ("apiVersion", self.api_version.into()),
            ("fieldsType", "FieldsV1".into()),
            ("fieldsV1", self.fields.into_json()),
        ];
        let mut value: Map<_, _> = fields.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        if let Some(time) = self.time {
            value.insert("time".into(), time.into());
        }
        if !self.subresource.is_empty() {
            value.insert("subresource".into(), self.subresource.into());
        }
        Value::Object(value)
    }

    /// Whether two entries are of the same manager. As upstream, one that applies is the same in every version of the
    /// kind; otherwise it would conflict with itself once its configuration names another version.
    fn is(&self, other: &Self) -> bool {
        (&self.manager, self.operation, &self.subresource)
            == (&other.manager, other.operation, &other.subresource)
            && (self.operation == Operation::Apply || self.api_version == other.api_version)
    }

    /// The manager's name in conflict messages.
    fn conflict_name(&self) -> String {
        let mut text = format!("{:?}", self.manager);
        if !self.subresource.is_empty() {
            text.push_str(&format!(" with subresource {:?}", self.subresource));
        }
        if self.operation == Operation::Update {
            text.push_str(&format!(" using {}", self.api_version));
            if let Some(time) = &self.time {
                text.push_str(&format!(" at {time}"));
            }
        }
        text
    }
}

/// The entries of an object; `None` when it is not tracked.
fn entries_of(object: &Object) -> Option<Vec<Entry>> {
    decode_entries(object.meta()?.get(MANAGED_FIELDS)?)
}

fn decode_entries(managed_fields: &Value) -> Option<Vec<Entry>> {
    let entries: Vec<_> = managed_fields.as_array()?.iter().filter_map(Entry::decode).collect();
    (!entries.is_empty()).then_some(entries)
}

/// `managedFields: [{}]`, or an empty list: the client requests that the object is no longer tracked.
fn is_reset(managed_fields: &Value) -> bool {
    let list = managed_fields.as_array();
    list.is_some_and(|list| list.iter().all(|entry| entry.as_object().is_some_and(Map::is_empty)))
}

fn store(object: &mut Object, mut entries: Vec<Entry>) {
    entries.retain(|entry| !entry.fields.is_empty());
    entries.sort_by(|a, b| (a.operation, &a.time, &a.manager).cmp(&(b.operation, &b.time, &b.manager)));
    let meta = object.meta_mut();
    if entries.is_empty() {
        meta.remove(MANAGED_FIELDS);
    } else {
        meta.insert(MANAGED_FIELDS.into(), entries.into_iter().map(Entry::encode).collect());
    }
}

fn entry(request: &WriteRequest, part: Part, operation: Operation) -> Entry {
    Entry {
        manager: request.manager.name.clone(),
        operation,
        api_version: request.kind.api_version(),
        subresource: match part {
            Part::Status => "status".into(),
            Part::Scale => "scale".into(),
            Part::Finalize => "finalize".into(),
            Part::EphemeralContainers => "ephemeralcontainers".into(),
            _ => String::new(),
        },
        time: Some(time(request.now)),
        fields: FieldSet::default(),
    }
}

fn time(now: Timestamp) -> String {
    now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

fn shape(kind: &Kind) -> Shape<'static> {
    Shape::root(schemas().root(kind), kind.custom)
}

/// The fields of a set that managers can own in this part of the object.
fn ownable(kind: &Kind, part: Part, set: FieldSet) -> FieldSet {
    let set = match part {
        Part::Status if kind.status_keeps_metadata() => {
            let set = set.without(&["f:spec", "f:apiVersion", "f:kind"]);
            if kind.plural == "deployments" { set.without_below("f:metadata", &["f:labels"]) } else { set }
        }
        Part::Status => set.only(&["f:status"]),
        // Upstream's strategy for these resets the spec, which never changes.
        Part::Main if kind.plural == "certificatesigningrequests" => {
            set.without(&["f:spec", "f:status", "f:apiVersion", "f:kind"])
        }
        Part::Main | Part::Scale if kind.status => set.without(&["f:status", "f:apiVersion", "f:kind"]),
        _ => set.without(&["f:apiVersion", "f:kind"]),
    };
    set.without_below("f:metadata", &OWN_METADATA)
}

/// Updates `managedFields` in a write other than apply. `old` is `None` for a create, and `new` the object as it was
/// sent, which gets its kind's defaults: fields that admission and the kind's own rules add later have no owner, as
/// upstream.
pub(crate) fn track(request: &WriteRequest, part: Part, new: &mut Object, old: Option<&Object>) {
    request.kind.fill_defaults(new);
    let sent = new.meta_mut().get_mut(MANAGED_FIELDS).map(Value::take).unwrap_or_default();
    let entries = entries_after(request, part, new, &sent, old);
    store(new, entries.unwrap_or_default());
}

/// The entries after a write; `None`: the object is not tracked. `sent`: the `managedFields` of the request.
fn entries_after(
    request: &WriteRequest,
    part: Part,
    new: &Object,
    sent: &Value,
    old: Option<&Object>,
) -> Option<Vec<Entry>> {
    let reset = is_reset(sent);
    let given = decode_entries(sent).filter(|_| part == Part::Main);
    let entries = given.or_else(|| old.and_then(entries_of).filter(|_| !reset));
    // Of the platform's own objects, people change nodes most: their labels, annotations and taints.
    let is_node = (request.kind.group, request.kind.plural) == ("", "nodes");
    let is_first = old.is_none() && (request.manager.tracked || is_node) && !reset;
    let entries = entries.or_else(|| is_first.then(Vec::new))?;
    let change = match old {
        Some(old) => Change::between(request.kind, part, old, new),
        None => Change::between(request.kind, part, &Object::default(), new),
    };
    Some(update(entries, &change, entry(request, part, Operation::Update)))
}

/// The fields that a write changes.
struct Change {
    /// Fields that are added, or whose value changes.
    set: FieldSet,
    removed: FieldSet,
}

impl Change {
    fn between(kind: &Kind, part: Part, old: &Object, new: &Object) -> Self {
        // Upstream compares the serialised Go types; the old side of a new object is the zero value.
        let written = |object: &Object, other: &Object| {
            let mut differing = differing_members(object, other);
            canonicalise_sent(kind, &mut differing);
            Value::Object(differing)
        };
        let found = typed::compare(shape(kind), &written(old, new), &written(new, old));
        let mut set = found.added;
        set.extend(&found.modified);
        Self { set: ownable(kind, part, set), removed: ownable(kind, part, found.removed) }
    }
}

/// The members of an object that differ from those of the other, without metadata that has no owners. Most of an object
/// stays the same in a write and need not be copied.
fn differing_members(object: &Object, other: &Object) -> Map<String, Value> {
    let none = Map::new();
    let others = other.meta().unwrap_or(&none);
    let is_owned = |name: &str| OWN_METADATA.iter().all(|own| own.strip_prefix("f:") != Some(name));
    let members = object.0.iter().filter_map(|(name, value)| {
        let value = match value {
            Value::Object(meta) if name == "metadata" => {
                let differing =
                    meta.iter().filter(|(name, value)| is_owned(name) && others.get(*name) != Some(value));
                differing.map(|(name, value)| (name.clone(), value.clone())).collect()
            }
            value if other.0.get(name) == Some(value) => return None,
            value => value.clone(),
        };
        Some((name.clone(), value))
    });
    members.collect()
}

/// The entries after an update by one manager: it owns the fields that it set, and removed fields have no owner.
fn update(mut entries: Vec<Entry>, change: &Change, by: Entry) -> Vec<Entry> {
    for entry in entries.iter_mut().filter(|entry| !entry.is(&by)) {
        entry.fields.subtract(&change.set);
        entry.fields.subtract(&change.removed);
    }
    match entries.iter_mut().find(|entry| entry.is(&by)) {
        Some(own) => {
            let is_changed = !change.set.is_empty() || !own.fields.intersection(&change.removed).is_empty();
            if is_changed {
                let mut fields = std::mem::take(&mut own.fields);
                fields.extend(&change.set);
                fields.subtract(&change.removed);
                *own = Entry { fields, ..by };
            }
        }
        None => entries.push(Entry { fields: change.set.clone(), ..by }),
    }
    cap(entries)
}

/// Merges the oldest updating managers when there are too many.
fn cap(mut entries: Vec<Entry>) -> Vec<Entry> {
    entries.retain(|entry| !entry.fields.is_empty());
    let updating = entries.iter().filter(|entry| entry.operation == Operation::Update).count();
    if updating <= UPDATE_MANAGERS_MAX {
        return entries;
    }
    entries.sort_by(|a, b| (a.operation, &a.time).cmp(&(b.operation, &b.time)));
    let first = entries.iter().position(|entry| entry.operation == Operation::Update).unwrap_or(0);
    let mut ancient = entries.remove(first);
    ancient.manager = ANCIENT_CHANGES.into();
    for _ in 0..updating - UPDATE_MANAGERS_MAX {
        let next = entries.remove(first);
        ancient.fields.extend(&next.fields);
        ancient.time = next.time;
    }
    entries.insert(first, ancient);
    entries
}

/// The result of an apply, from the live object (`None`: it is created) and the applied configuration.
pub(crate) fn apply(
    request: &WriteRequest,
    part: Part,
    live: Option<&Object>,
    applied: &Object,
    force: bool,
) -> Result<Object, ApiError> {
    let (kind, shape) = (request.kind, shape(request.kind));
    let applied = Value::Object(applied.without_managed_fields().0);
    let config = applied.to_string();
    let base = live.map(Object::without_managed_fields).unwrap_or_default();
    let mut entries = live.and_then(entries_of).unwrap_or_default();
    if entries.is_empty() && live.is_some() {
        let change = Change::between(kind, Part::Whole, &Object::default(), &base);
        let first = entry(request, Part::Main, Operation::Update);
        entries.push(Entry { manager: BEFORE_FIRST_APPLY.into(), fields: change.set, ..first });
    }

    let by = entry(request, part, Operation::Apply);
    let last = entries.iter().position(|entry| entry.is(&by)).map(|at| entries.remove(at));
    let wanted = ownable(kind, part, typed::fields_of(shape, &applied));
    let mut value = typed::merged(shape, &Value::Object(base.0.clone()), &applied);
    if let Some(last) = &last {
        let mut kept = wanted.clone();
        entries.iter().for_each(|entry| kept.extend(&entry.fields));
        let mut gone = last.fields.with_parents();
        gone.subtract(&kept.with_parents());
        typed::remove(shape, &mut value, &gone);
    }
    let Value::Object(map) = value else {
        return Err(ApiError::internal("the merged value is not an object"));
    };
    let mut object = Object(map);

    let mut change = Change::between(kind, part, &base, &object);
    let allowed = live.map(|live| last_applied(request, live)).unwrap_or_default();
    // A field that is applied with its zero value is omitted by Go's serialisation, but counts as changed.
    let zeroed = change.removed.intersection(&wanted);
    change.set.extend(&zeroed);
    let conflicts = take_over(&mut entries, &change, &allowed);
    if !force && !conflicts.is_empty() {
        return Err(ApiError::apply_conflict(conflicts));
    }
    let unchanged = change.set.is_empty() && change.removed.is_empty();
    let same = last.filter(|last| last.fields == wanted && unchanged);
    let time = same.map_or(by.time.clone(), |last| last.time);
    entries.push(Entry { fields: wanted, time, ..by });
    store(&mut object, entries);
    if request.manager.name == KUBECTL && !live.map_or("", last_applied_text).is_empty() {
        map_at(object.meta_mut(), "annotations").insert(ANNOTATION_LAST_APPLIED.into(), config.into());
    }
    Ok(object)
}

/// Refuses a configuration with undeclared fields, at `unknown`, or with repeated items of a list. As upstream, this is
/// a server error, and independent of the field validation.
pub(crate) fn check_declared(kind: &Kind, applied: &Object, unknown: &[String]) -> Result<(), ApiError> {
    let value = Value::Object(applied.0.clone());
    let errors = declared::errors(shape(kind), &value, unknown);
    let why = match errors.as_slice() {
        [] => return Ok(()),
        [one] => one.clone(),
        several => format!("errors:\n  {}", several.join("\n  ")),
    };
    let (namespace, name) = (applied.meta_str("namespace"), applied.name());
    let group_version = kind.api_version();
    Err(ApiError::without_reason(format!(
        "failed to create typed patch object ({namespace}/{name}; {group_version}, Kind={}): {why}",
        kind.kind
    )))
}

/// Takes the fields that an apply changes from their other owners. Returns the conflicts: manager and field.
fn take_over(entries: &mut [Entry], change: &Change, allowed: &FieldSet) -> Vec<(String, String)> {
    let mut conflicts = Vec::new();
    for entry in entries {
        let mut refused = entry.fields.intersection(&change.set);
        refused.subtract(allowed);
        conflicts.extend(refused.paths().into_iter().map(|path| (entry.conflict_name(), path)));
        entry.fields.subtract(&change.set);
        entry.fields.subtract(&change.removed);
    }
    conflicts
}

fn last_applied_text(object: &Object) -> &str {
    object.str_at(&["metadata", "annotations", ANNOTATION_LAST_APPLIED])
}

/// The fields that client-side `kubectl apply` set: `kubectl apply --server-side` may take them over (upstream's
/// `lastAppliedManager`).
fn last_applied(request: &WriteRequest, live: &Object) -> FieldSet {
    if request.manager.name != KUBECTL {
        return FieldSet::default();
    }
    let config = serde_json::from_str(last_applied_text(live)).unwrap_or(Value::Null);
    if config.is_object() { typed::fields_of(shape(request.kind), &config) } else { FieldSet::default() }
}

#[cfg(test)]
mod tests;
