//! Responses: objects, lists, tables and metadata, as bytes.

use axum::{body::Body, response::Response};
use bytes::Bytes;
use http::{HeaderValue, StatusCode, header};
use jiff::Timestamp;
use mayfly_store::{Entry, Revision};
use serde_json::{Map, Value, json};

use crate::{
    negotiate::Representation,
    object::{
        HEAD_BYTES_MAX as TYPE_BYTES_MAX, METADATA_OPENS, Object, SPLICED_BYTES, splice, splice_metadata,
    },
    registry::{Column, Kind},
    status::ApiError,
};

/// The part of each object that a table has besides its cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IncludeObject {
    None,
    Metadata,
    Object,
}

impl IncludeObject {
    pub(crate) fn parse(text: Option<&str>) -> Result<Self, ApiError> {
        match text {
            None | Some("" | "Metadata") => Ok(Self::Metadata),
            Some("None") => Ok(Self::None),
            Some("Object") => Ok(Self::Object),
            Some(other) => Err(ApiError::bad_request(format!("unrecognized includeObject value: {other:?}"))),
        }
    }
}

/// The representation of objects of a kind that the client accepts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ObjectView {
    pub(crate) kind: &'static Kind,
    pub(crate) representation: Representation,
    pub(crate) include: IncludeObject,
    pub(crate) now: Timestamp,
}

/// The metadata of a list.
#[derive(Clone, Debug, Default)]
pub(crate) struct ListMeta {
    pub(crate) revision: Revision,
    pub(crate) continue_token: Option<String>,
    pub(crate) remaining: Option<usize>,
}

impl ListMeta {
    fn to_value(&self) -> Value {
        let mut meta = json!({"resourceVersion": self.revision.to_string()});
        if let Some(token) = &self.continue_token {
            meta["continue"] = token.as_str().into();
        }
        if let Some(remaining) = self.remaining {
            meta["remainingItemCount"] = remaining.into();
        }
        meta
    }
}

pub(crate) fn json_response(code: StatusCode, body: impl Into<Bytes>) -> Response {
    let mut response = Response::new(Body::from(body.into()));
    *response.status_mut() = code;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

pub(crate) fn json_value(code: StatusCode, value: &Value) -> Response {
    json_response(code, serde_json::to_vec(value).expect("a JSON value serialises"))
}

impl ObjectView {
    /// Appends a stored object.
    pub(crate) fn append_stored(
        &self,
        out: &mut Vec<u8>,
        stored: &[u8],
        revision: Revision,
    ) -> Result<(), ApiError> {
        self.append_stored_with(out, stored, revision, true).map_err(ApiError::internal)
    }

    /// Appends a stored object, optionally without the columns of a table. After an error, the appended bytes are not
    /// valid JSON.
    pub(crate) fn append_stored_with(
        &self,
        out: &mut Vec<u8>,
        stored: &[u8],
        revision: Revision,
        with_columns: bool,
    ) -> Result<(), serde_json::Error> {
        if self.kind.converts() && self.representation != Representation::Metadata {
            let mut object = Object::from_stored(stored, revision)?;
            self.kind.to_this_version(&mut object);
            self.append_decoded(out, object, with_columns);
            return Ok(());
        }
        if (self.kind.group, self.kind.plural) == ("apps", "daemonsets")
            && self.representation == Representation::Metadata
        {
            self.append_decoded(out, Object::from_stored(stored, revision)?, with_columns);
            return Ok(());
        }
        match self.representation {
            Representation::Object => {
                out.reserve(stored.len() + SPLICED_BYTES);
                splice(out, stored, revision);
            }
            Representation::Metadata => {
                out.extend_from_slice(
                    br#"{"kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1","metadata":"#,
                );
                splice_metadata(out, stored, revision)?;
                out.push(b'}');
            }
            Representation::Table => {
                self.append_decoded(out, Object::from_stored(stored, revision)?, with_columns);
            }
        }
        Ok(())
    }

    /// Appends a decoded object.
    pub(crate) fn append_decoded(&self, out: &mut Vec<u8>, object: Object, with_columns: bool) {
        let value = match self.representation {
            Representation::Object => Value::Object(object.0),
            Representation::Metadata => partial(&object),
            Representation::Table => {
                let version = object.resource_version().to_owned();
                let rows = vec![self.row(object)];
                self.table(json!({"resourceVersion": version}), rows, with_columns)
            }
        };
        serde_json::to_writer(out, &value).expect("a Vec takes every byte");
    }

    /// Renders a complete list.
    pub(crate) fn list<'a>(
        &self,
        meta: &ListMeta,
        entries: impl Iterator<Item = &'a Entry>,
    ) -> Result<Vec<u8>, ApiError> {
        let mut out = Vec::with_capacity(1024);
        let decode = |entry: &Entry| self.kind.decode(entry).map_err(ApiError::internal);
        if self.representation == Representation::Table {
            let rows = entries.map(|entry| Ok(self.row(decode(entry)?))).collect::<Result<_, ApiError>>()?;
            let table = self.table(meta.to_value(), rows, true);
            serde_json::to_writer(&mut out, &table).expect("a Vec takes every byte");
            return Ok(out);
        }
        let (kind, api_version) = match self.representation {
            Representation::Metadata => ("PartialObjectMetadataList".to_owned(), "meta.k8s.io/v1".to_owned()),
            _ => (format!("{}List", self.kind.kind), self.kind.api_version()),
        };
        let mut meta = meta.to_value();
        // Upstream renders lists of custom kinds without Go's types, which omit an empty `continue`.
        if self.kind.definition.is_some() && self.representation == Representation::Object {
            map_entry_if_absent(&mut meta, "continue");
        }
        out.extend_from_slice(
            format!("{{\"kind\":\"{kind}\",\"apiVersion\":\"{api_version}\",\"metadata\":{meta},\"items\":[")
                .as_bytes(),
        );
        for (at, entry) in entries.enumerate() {
            if at > 0 {
                out.push(b',');
            }
            let from = out.len();
            self.append_stored(&mut out, &entry.value, entry.modified)?;
            if self.representation == Representation::Object && !self.kind.custom {
                without_type(&mut out, from);
            }
        }
        out.extend_from_slice(b"]}");
        Ok(out)
    }

    fn row(&self, object: Object) -> Value {
        let cells = self.kind.table_cells(&object, self.now);
        match self.include {
            IncludeObject::None => json!({"cells": cells}),
            IncludeObject::Metadata => json!({"cells": cells, "object": partial(&object)}),
            IncludeObject::Object => json!({"cells": cells, "object": Value::Object(object.0)}),
        }
    }

    fn table(&self, meta: Value, rows: Vec<Value>, with_columns: bool) -> Value {
        let columns = self.kind.columns.iter().map(Column::to_value);
        let columns = if with_columns { columns.collect() } else { Value::Null };
        json!({
            "kind": "Table",
            "apiVersion": "meta.k8s.io/v1",
            "metadata": meta,
            "columnDefinitions": columns,
            "rows": rows,
        })
    }
}

fn map_entry_if_absent(meta: &mut Value, field: &str) {
    if let Value::Object(map) = meta {
        map.entry(field).or_insert_with(|| "".into());
    }
}

/// Removes apiVersion and kind from the object that begins at `from`: upstream omits them in the items of lists of
/// built-in kinds.
fn without_type(out: &mut Vec<u8>, from: usize) {
    let head = &out[from..out.len().min(from + TYPE_BYTES_MAX)];
    let Some(at) = head.windows(METADATA_OPENS.len()).position(|window| window == METADATA_OPENS) else {
        return;
    };
    out.drain(from + 1..from + at);
}

fn partial(object: &Object) -> Value {
    let mut metadata = object.meta().cloned().unwrap_or_else(Map::new);
    // Upstream adds this annotation when it converts a DaemonSet to the served version; metadata alone is not
    // converted.
    if let Some(Value::Object(annotations)) = metadata.get_mut("annotations")
        && annotations.remove("deprecated.daemonset.template.generation").is_some()
        && annotations.is_empty()
    {
        metadata.remove("annotations");
    }
    json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": metadata})
}
