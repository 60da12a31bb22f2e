//! Label and field selectors of lists and watches.

use mayfly_api::selector::Selector;
use mayfly_store::{Entry, Range, Scope};
use serde_json::Value;

use crate::{
    event_objects::EventObjects,
    object::{Object, labels_of},
    registry::{Kind, registry},
    request::Query,
    status::ApiError,
};

/// The parsed selectors of a request.
#[derive(Clone, Debug)]
pub(crate) struct Selection {
    labels: Selector,
    fields: Vec<FieldRequirement>,
    /// The name in `metadata.name=x`, which narrows the range where possible.
    name: Option<String>,
    namespace: Option<String>,
    /// Converts a stored object to the requested version, whose fields the selector names.
    from_storage: Option<fn(&mut Object)>,
}

#[derive(Clone, Debug)]
struct FieldRequirement {
    path: Vec<String>,
    default: &'static str,
    equal: bool,
    value: String,
}

impl Selection {
    pub(crate) fn parse(kind: &Kind, query: &Query) -> Result<Self, ApiError> {
        let labels = query.label_selector.as_deref().unwrap_or("");
        let labels = Selector::parse(labels).map_err(|error| ApiError::bad_request(error.to_string()))?;
        let from_storage = kind.conversion.map(|conversion| conversion.from_storage);
        let mut selection = Self { labels, fields: Vec::new(), name: None, namespace: None, from_storage };
        for (path, equal, value) in terms(query.field_selector.as_deref().unwrap_or(""))? {
            let Some(default) = kind.selectable_default(&path) else {
                let is_plain = kind.selectable.is_empty() && !kind.custom;
                let message = match is_plain {
                    // Upstream has an own conversion of labels for this kind.
                    _ if is_job(kind) => format!("field label {path:?} not supported for Job"),
                    true => format!(
                        "{path:?} is not a known field selector: only \"metadata.name\", \"metadata.namespace\""
                    ),
                    false => format!("field label not supported: {path}"),
                };
                return Err(ApiError::bad_request(message));
            };
            match (path.as_str(), equal) {
                ("metadata.name", true) if selection.name.is_none() => selection.name = Some(value),
                ("metadata.namespace", true) if selection.namespace.is_none() => {
                    selection.namespace = Some(value)
                }
                _ => {
                    let path = match path.as_str() {
                        JOB_SUCCESSFUL if is_job(kind) => "status.succeeded",
                        path => path,
                    };
                    let path = path.split('.').map(str::to_owned).collect();
                    selection.fields.push(FieldRequirement { path, default, equal, value });
                }
            }
        }
        Ok(selection)
    }

    /// The narrowest range of the store for a request in `namespace` (empty: all namespaces, or a cluster-scoped
    /// kind). [`Self::matches`] checks the remaining conditions.
    pub(crate) fn range(&mut self, kind: &Kind, namespace: &str) -> Range {
        let resource = registry().store_resource(kind);
        let within = match (namespace, &self.namespace) {
            ("", Some(_)) => self.namespace.take(),
            ("", None) => None,
            (path, Some(asked)) if path == asked => self.namespace.take(),
            (path, _) => Some(path.to_owned()),
        };
        let scope = match (within, kind.namespaced) {
            (Some(namespace), _) => match self.name.take() {
                Some(name) => Scope::Object { namespace: namespace.into(), name: name.into() },
                None => Scope::Namespace(namespace.into()),
            },
            (None, false) => match self.name.take() {
                Some(name) => Scope::Object { namespace: "".into(), name: name.into() },
                None => Scope::All,
            },
            (None, true) => Scope::All,
        };
        Range { resource, scope }
    }

    /// Whether everything in the range is selected, so that no object needs to be parsed.
    pub(crate) fn is_everything(&self) -> bool {
        self.labels.is_empty() && self.fields.is_empty() && self.name.is_none() && self.namespace.is_none()
    }

    /// The fields that must have one value, as a hint for views that can filter by them.
    pub(crate) fn equalities(&self) -> Vec<(String, String)> {
        let equal = self.fields.iter().filter(|field| field.equal);
        equal.map(|field| (field.path.join("."), field.value.clone())).collect()
    }

    /// Whether an object in the range is selected. For lists: labels are read without decoding the rest.
    pub(crate) fn matches(&self, entry: &Entry) -> bool {
        self.matches_key(entry)
            && (self.labels.is_empty() || self.labels.matches(&labels_of(&entry.value)))
            && (self.fields.is_empty()
                || Object::from_entry(entry).is_ok_and(|object| self.matches_fields(&object)))
    }

    /// Like [`Self::matches`], for an event of a watch; the decoded object is shared between watches.
    pub(crate) fn matches_event(&self, entry: &Entry, objects: &EventObjects) -> bool {
        if !self.matches_key(entry) {
            return false;
        }
        if self.labels.is_empty() && self.fields.is_empty() {
            return true;
        }
        let Some(object) = objects.get(entry) else { return false };
        self.matches_fields(&object) && (self.labels.is_empty() || self.labels.matches(&object.labels()))
    }

    fn matches_key(&self, entry: &Entry) -> bool {
        let fits = |asked: &Option<String>, found: &str| asked.as_deref().is_none_or(|asked| asked == found);
        fits(&self.name, &entry.key.name) && fits(&self.namespace, &entry.key.namespace)
    }

    fn matches_fields(&self, object: &Object) -> bool {
        if let Some(from_storage) = self.from_storage.filter(|_| !self.fields.is_empty()) {
            let mut object = object.clone();
            from_storage(&mut object);
            return self.fields.iter().all(|field| field.matches(&object));
        }
        self.fields.iter().all(|field| field.matches(object))
    }
}

impl FieldRequirement {
    fn matches(&self, object: &Object) -> bool {
        let path: Vec<&str> = self.path.iter().map(String::as_str).collect();
        let found = match object.at(&path) {
            None | Some(Value::Null) => self.default == self.value,
            Some(Value::String(text)) => *text == self.value,
            Some(other) => {
                let text = other.to_string();
                text == self.value
            }
        };
        found == self.equal
    }
}

/// The only label of a Job's fields that differs from the field's path.
pub(crate) const JOB_SUCCESSFUL: &str = "status.successful";

fn is_job(kind: &Kind) -> bool {
    (kind.group, kind.kind) == ("batch", "Job")
}

/// The name that a field selector requires, if it can be the name of an object (upstream's `RequiresExactMatch`).
pub(crate) fn selected_name(selector: &str) -> Option<String> {
    let mut terms = terms(selector).ok()?.into_iter();
    let (_, _, name) = terms.find(|(path, equal, _)| path == "metadata.name" && *equal)?;
    let is_segment = !matches!(&*name, "" | "." | "..") && !name.contains(['/', '%']);
    is_segment.then_some(name)
}

/// `a=b,c==d,e!=f`, with `\,`, `\=` and `\\` inside values.
fn terms(text: &str) -> Result<Vec<(String, bool, String)>, ApiError> {
    let not_understood =
        |term: &str| ApiError::bad_request(format!("invalid selector: '{text}'; can't understand '{term}'"));
    let mut terms = Vec::new();
    for term in split_unescaped(text) {
        if term.is_empty() {
            continue;
        }
        let (path, equal, value) = if let Some((path, value)) = term.split_once("!=") {
            (path, false, value)
        } else if let Some((path, value)) = term.split_once("==") {
            (path, true, value)
        } else {
            let (path, value) = term.split_once('=').ok_or_else(|| not_understood(term))?;
            (path, true, value)
        };
        terms.push((path.trim().to_owned(), equal, unescape(value).ok_or_else(|| not_understood(term))?));
    }
    Ok(terms)
}

fn split_unescaped(text: &str) -> Vec<&str> {
    let (mut parts, mut start, mut escaped) = (Vec::new(), 0, false);
    for (at, character) in text.char_indices() {
        match character {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            ',' => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts
}

fn unescape(text: &str) -> Option<String> {
    let (mut out, mut characters) = (String::new(), text.chars());
    while let Some(character) = characters.next() {
        match character {
            '\\' => out.push(characters.next().filter(|next| matches!(next, '\\' | ',' | '='))?),
            ',' | '=' => return None,
            other => out.push(other),
        }
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::registry::registry;

    #[test]
    fn fields_are_compared_with_their_defaults() {
        let pods = registry().find("", "v1", "pods").unwrap();
        let entry = |value: Value| {
            let object = Object(value.as_object().unwrap().clone());
            Entry {
                key: mayfly_store::Key::new("pods", "a", "x"),
                value: object.encode(),
                created: mayfly_store::Revision(1),
                modified: mayfly_store::Revision(1),
            }
        };
        let placed =
            entry(json!({"metadata": {"name": "x", "labels": {"a": "b"}}, "spec": {"nodeName": "n"}}));
        let unplaced = entry(json!({"metadata": {"name": "x"}, "spec": {}}));
        for (labels, fields, first, second) in [
            ("", "spec.nodeName=n", true, false),
            ("", "spec.nodeName=", false, true),
            ("", "spec.nodeName!=n", false, true),
            ("", "spec.nodeName!=", true, false),
            ("", "spec.hostNetwork=false", true, true),
            ("a=b", "", true, false),
            ("!a", "", false, true),
            ("a=b", "spec.nodeName=m", false, false),
        ] {
            let query = Query {
                label_selector: Some(labels.into()),
                field_selector: Some(fields.into()),
                ..Query::default()
            };
            let selection = Selection::parse(pods, &query).unwrap();
            assert_eq!(
                (selection.matches(&placed), selection.matches(&unplaced)),
                (first, second),
                "{labels} {fields}"
            );
        }
    }

    #[test]
    fn jobs_are_selected_by_the_number_of_their_successes() {
        let jobs = registry().find("batch", "v1", "jobs").unwrap();
        let job = |status: Value| {
            let object = json!({"metadata": {"name": "x"}, "status": status});
            Entry {
                key: mayfly_store::Key::new("jobs.batch", "a", "x"),
                value: Object(object.as_object().unwrap().clone()).encode(),
                created: mayfly_store::Revision(1),
                modified: mayfly_store::Revision(1),
            }
        };
        let parse = |fields: &str| {
            Selection::parse(jobs, &Query { field_selector: Some(fields.into()), ..Query::default() })
        };
        for (fields, done, fresh) in
            [("status.successful=1", true, false), ("status.successful=0", false, true)]
        {
            let selection = parse(fields).unwrap();
            let found =
                (selection.matches(&job(json!({"succeeded": 1}))), selection.matches(&job(json!({}))));
            assert_eq!(found, (done, fresh), "{fields}");
        }
        let refused = parse("status.active=1").err().unwrap();
        assert_eq!(refused.message, "field label \"status.active\" not supported for Job");
    }

    #[test]
    fn unknown_fields_are_refused_and_names_narrow_the_range() {
        let pods = registry().find("", "v1", "pods").unwrap();
        let parse = |fields: &str| {
            Selection::parse(pods, &Query { field_selector: Some(fields.into()), ..Query::default() })
        };
        let error = parse("spec.color=red").unwrap_err();
        assert!(error.message.contains("field label not supported: spec.color"), "{error}");
        let object = |namespace: &str| Scope::Object { namespace: namespace.into(), name: "x".into() };
        for (fields, namespace, scope, everything) in [
            ("metadata.name=x,metadata.namespace=y", "", object("y"), true),
            ("metadata.name=x", "y", object("y"), true),
            ("metadata.name=x", "", Scope::All, false),
            ("metadata.namespace=z", "y", Scope::Namespace("y".into()), false),
            ("metadata.namespace=y", "y", Scope::Namespace("y".into()), true),
            ("", "", Scope::All, true),
        ] {
            let mut selection = parse(fields).unwrap();
            let range = selection.range(pods, namespace);
            assert_eq!(
                (range.scope, selection.is_everything()),
                (scope, everything),
                "{fields} in {namespace}"
            );
        }
        assert!(parse("metadata.name").is_err());
        assert_eq!(parse(r"metadata.name=a\,b").unwrap().name.as_deref(), Some("a,b"));
    }
}
