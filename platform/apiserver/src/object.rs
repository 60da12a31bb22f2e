//! Objects as JSON, and their stored form.
//!
//! Stored bytes begin with `{"apiVersion":…,"kind":…,"metadata":{` and have no `resourceVersion`, which is the
//! entry's revision. A response inserts it at a known offset, without parsing the object.

use std::collections::BTreeMap;

use bytes::Bytes;
use mayfly_store::{Entry, Revision};
use serde::{Deserialize, de::IgnoredAny};
use serde_json::{Map, Value};

/// The beginning of metadata in stored bytes.
pub(crate) const METADATA_OPENS: &[u8] = b"\"metadata\":{";

/// A decoded object.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Object(pub(crate) Map<String, Value>);

impl Object {
    /// Decodes an entry and sets its resourceVersion.
    pub(crate) fn from_entry(entry: &Entry) -> Result<Self, serde_json::Error> {
        Self::from_stored(&entry.value, entry.modified)
    }

    pub(crate) fn from_stored(value: &[u8], revision: Revision) -> Result<Self, serde_json::Error> {
        let mut object = Self(serde_json::from_slice(value)?);
        object.set_resource_version(revision);
        Ok(object)
    }

    pub(crate) fn set_resource_version(&mut self, revision: Revision) {
        self.meta_mut().insert("resourceVersion".into(), Value::String(revision.to_string()));
    }

    /// A copy without `metadata.managedFields`. An object without metadata gets empty metadata.
    pub(crate) fn without_managed_fields(&self) -> Self {
        let copied = self.0.iter().map(|(name, value)| {
            let value = match (name.as_str(), value) {
                ("metadata", Value::Object(meta)) => {
                    let kept = meta.iter().filter(|(name, _)| *name != "managedFields");
                    kept.map(|(name, value)| (name.clone(), value.clone())).collect()
                }
                _ => value.clone(),
            };
            (name.clone(), value)
        });
        let mut copy = Self(copied.collect());
        copy.meta_mut();
        copy
    }

    pub(crate) fn meta(&self) -> Option<&Map<String, Value>> {
        self.0.get("metadata").and_then(Value::as_object)
    }

    pub(crate) fn meta_mut(&mut self) -> &mut Map<String, Value> {
        map_at(&mut self.0, "metadata")
    }

    /// The map under a top-level key; created if absent.
    pub(crate) fn map_mut(&mut self, key: &str) -> &mut Map<String, Value> {
        map_at(&mut self.0, key)
    }

    /// A string field of the metadata; empty if absent.
    pub(crate) fn meta_str(&self, key: &str) -> &str {
        self.meta().and_then(|meta| meta.get(key)).and_then(Value::as_str).unwrap_or("")
    }

    pub(crate) fn name(&self) -> &str {
        self.meta_str("name")
    }

    pub(crate) fn uid(&self) -> &str {
        self.meta_str("uid")
    }

    pub(crate) fn resource_version(&self) -> &str {
        self.meta_str("resourceVersion")
    }

    pub(crate) fn is_terminating(&self) -> bool {
        self.meta().is_some_and(|meta| meta.get("deletionTimestamp").is_some_and(|v| !v.is_null()))
    }

    /// The value at a path such as `["spec", "nodeName"]`.
    pub(crate) fn at(&self, path: &[&str]) -> Option<&Value> {
        let (first, rest) = path.split_first()?;
        rest.iter().try_fold(self.0.get(*first)?, |value, key| value.get(key))
    }

    pub(crate) fn str_at(&self, path: &[&str]) -> &str {
        self.at(path).and_then(Value::as_str).unwrap_or("")
    }

    pub(crate) fn labels(&self) -> BTreeMap<String, String> {
        let labels = self.at(&["metadata", "labels"]).and_then(Value::as_object).into_iter().flatten();
        labels.map(|(key, value)| (key.clone(), value.as_str().unwrap_or("").to_owned())).collect()
    }

    /// The finalizers in the metadata.
    pub(crate) fn finalizers(&self) -> Vec<&str> {
        let list = self.meta().and_then(|meta| meta.get("finalizers")).and_then(Value::as_array);
        list.into_iter().flatten().filter_map(Value::as_str).collect()
    }

    /// The stored form (see the module documentation).
    pub(crate) fn encode(&self) -> Bytes {
        let mut out = Vec::with_capacity(512);
        out.push(b'{');
        for key in ["apiVersion", "kind"] {
            write_string(&mut out, key);
            out.push(b':');
            write_string(&mut out, self.0.get(key).and_then(Value::as_str).unwrap_or(""));
            out.push(b',');
        }
        out.extend_from_slice(METADATA_OPENS);
        let mut first = true;
        for (key, value) in self.meta().into_iter().flatten().filter(|(key, _)| *key != "resourceVersion") {
            if !std::mem::take(&mut first) {
                out.push(b',');
            }
            write_member(&mut out, key, value);
        }
        out.push(b'}');
        for (key, value) in &self.0 {
            if !matches!(key.as_str(), "apiVersion" | "kind" | "metadata") {
                out.push(b',');
                write_member(&mut out, key, value);
            }
        }
        out.push(b'}');
        Bytes::from(out)
    }
}

/// The map under `key`; created if absent or of another type.
pub(crate) fn map_at<'a>(map: &'a mut Map<String, Value>, key: &str) -> &'a mut Map<String, Value> {
    let value = map.entry(key).or_insert_with(|| Value::Object(Map::new()));
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    value.as_object_mut().expect("made an object above")
}

fn write_member(out: &mut Vec<u8>, key: &str, value: &Value) {
    write_string(out, key);
    out.push(b':');
    serde_json::to_writer(out, value).expect("a Vec takes every byte");
}

fn write_string(out: &mut Vec<u8>, text: &str) {
    serde_json::to_writer(out, text).expect("a Vec takes every byte");
}

/// Capacity for the bytes that [`splice`] adds: the field and a number.
pub(crate) const SPLICED_BYTES: usize = 48;

/// Appends a stored object with its resourceVersion.
pub(crate) fn splice(out: &mut Vec<u8>, stored: &[u8], revision: Revision) {
    let Some(at) = metadata_at(stored) else { return out.extend_from_slice(stored) };
    out.extend_from_slice(&stored[..at]);
    splice_version(out, &stored[at..], revision);
    out.extend_from_slice(&stored[at..]);
}

/// Appends the metadata of a stored object, with its resourceVersion; the rest of the object is not parsed.
pub(crate) fn splice_metadata(
    out: &mut Vec<u8>,
    stored: &[u8],
    revision: Revision,
) -> Result<(), serde_json::Error> {
    let Some(at) = metadata_at(stored) else {
        out.extend_from_slice(b"{}");
        return Ok(());
    };
    let mut values = serde_json::Deserializer::from_slice(&stored[at - 1..]).into_iter::<IgnoredAny>();
    values.next().transpose()?;
    let end = at - 1 + values.byte_offset();
    out.push(b'{');
    splice_version(out, &stored[at..], revision);
    out.extend_from_slice(&stored[at..end]);
    Ok(())
}

/// The offset of metadata's fields in stored bytes.
fn metadata_at(stored: &[u8]) -> Option<usize> {
    let head = &stored[..stored.len().min(HEAD_BYTES_MAX)];
    let opens = head.windows(METADATA_OPENS.len()).position(|window| window == METADATA_OPENS);
    opens.map(|at| at + METADATA_OPENS.len())
}

/// Appends `resourceVersion`, and a comma unless `rest`, the rest of the metadata, is empty.
fn splice_version(out: &mut Vec<u8>, rest: &[u8], revision: Revision) {
    out.extend_from_slice(b"\"resourceVersion\":\"");
    out.extend_from_slice(revision.to_string().as_bytes());
    out.extend_from_slice(if rest.first() == Some(&b'}') { b"\"" } else { b"\"," });
}

/// `apiVersion` and `kind` come before metadata and are short.
pub(crate) const HEAD_BYTES_MAX: usize = 400;

/// The labels of a stored object, for label selectors.
pub(crate) fn labels_of(stored: &[u8]) -> BTreeMap<String, String> {
    #[derive(Deserialize)]
    struct Head {
        metadata: Labels,
    }
    #[derive(Deserialize)]
    struct Labels {
        #[serde(default)]
        labels: Option<BTreeMap<String, String>>,
    }
    serde_json::from_slice::<Head>(stored).ok().and_then(|head| head.metadata.labels).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn encoding_puts_metadata_first_and_splicing_adds_the_version() {
        let value = json!({
            "apiVersion": "v1", "kind": "ConfigMap", "data": {"a": "\"metadata\":{"},
            "metadata": {"name": "x", "resourceVersion": "7", "labels": {"k": "v"}}
        });
        let object = Object(value.as_object().unwrap().clone());
        let stored = object.encode();
        assert!(stored.starts_with(br#"{"apiVersion":"v1","kind":"ConfigMap","metadata":{"#));
        assert!(!String::from_utf8_lossy(&stored).contains("resourceVersion"));
        let mut out = Vec::new();
        splice(&mut out, &stored, Revision(7));
        assert_eq!(serde_json::from_slice::<Value>(&out).unwrap(), value);
        assert_eq!(labels_of(&stored)["k"], "v");
        let mut metadata = Vec::new();
        splice_metadata(&mut metadata, &stored, Revision(7)).unwrap();
        assert_eq!(serde_json::from_slice::<Value>(&metadata).unwrap(), value["metadata"]);
    }

    #[test]
    fn empty_metadata_is_spliced_too() {
        let stored = Object(json!({"apiVersion": "v1", "kind": "X"}).as_object().unwrap().clone()).encode();
        let mut out = Vec::new();
        splice(&mut out, &stored, Revision(3));
        assert_eq!(serde_json::from_slice::<Value>(&out).unwrap()["metadata"]["resourceVersion"], "3");
        let mut metadata = Vec::new();
        splice_metadata(&mut metadata, &stored, Revision(3)).unwrap();
        assert_eq!(metadata, br#"{"resourceVersion":"3"}"#);
    }
}
