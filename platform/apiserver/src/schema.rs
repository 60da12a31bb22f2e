//! The shape of every kind: fields, types, and how lists and maps merge.
//!
//! The shapes come from the kinds' own schemas (`schemars`), the merge rules from upstream's OpenAPI document
//! (`merge_keys.json`: definition, then field). The shape of a kind is built at the first use of that kind, without
//! the descriptions; kinds share the shapes of the definitions they have in common. Unknown fields, strategic merge
//! and server-side apply all read these shapes. They live as long as the process, as the rows of the registry do.

mod compile;
mod describe;
mod go_types;
mod normalise;
mod quantity;
pub(crate) mod wire;

use std::sync::{LazyLock, OnceLock};

use hashbrown::HashMap;
use parking_lot::{Mutex, RwLock};

pub(crate) use compile::definitions;
pub(crate) use normalise::{Findings, normalise, normalise_metadata, schema_type};
pub(crate) use quantity::{ParsedQuantity, QuantityError};

use crate::registry::Kind;

/// A handle of a node. The node is set when its definition has been compiled, which is before [`Schemas::root`]
/// returns; types may be recursive.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NodeId(&'static OnceLock<Node>);

/// The shape of one value.
#[derive(Debug)]
pub(crate) enum Node {
    /// Any value (`FieldsV1`, `RawExtension`).
    Any,
    String,
    Integer,
    Number,
    Boolean,
    IntOrString,
    /// A number is accepted and becomes a string.
    Quantity,
    Map(NodeId),
    List(NodeId),
    Struct(Struct),
}

#[derive(Debug, Default)]
pub(crate) struct Struct {
    pub(crate) fields: HashMap<Box<str>, Field>,
    /// Server-side apply: the struct has one owner as a whole, wherever it is used.
    pub(crate) atomic: bool,
    pub(crate) required: Vec<Box<str>>,
}

/// A field of a struct, and how it merges.
#[derive(Debug)]
pub(crate) struct Field {
    pub(crate) node: NodeId,
    pub(crate) merge: Merge,
}

/// The merge rule of a field's value. Built from `x-kubernetes-patch-*`, `-list-*` and `-map-type`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Merge {
    /// Strategic merge: lists merge (by `merge_key`, or as a set of primitives) instead of being replaced.
    pub(crate) patch_merge: bool,
    pub(crate) patch_replace: bool,
    pub(crate) merge_key: Option<Box<str>>,
    /// Server-side apply: the key of a list's items.
    pub(crate) list: ListType,
    /// Server-side apply: the map, or struct, has one owner as a whole.
    pub(crate) atomic_map: bool,
}

/// `x-kubernetes-list-type`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum ListType {
    #[default]
    Atomic,
    Set,
    Map(Vec<Box<str>>),
}

type KindKey = (&'static str, &'static str, &'static str);

/// The shapes compiled so far.
#[derive(Default)]
pub(crate) struct Schemas {
    roots: RwLock<HashMap<KindKey, NodeId>>,
    /// Definitions by name, shared between kinds. Held while a kind is compiled.
    definitions: Mutex<HashMap<Box<str>, NodeId>>,
}

static SCHEMAS: LazyLock<Schemas> = LazyLock::new(Schemas::default);

pub(crate) fn schemas() -> &'static Schemas {
    &SCHEMAS
}

impl Schemas {
    pub(crate) fn node(&self, id: NodeId) -> &'static Node {
        id.0.get().unwrap_or(&Node::Any)
    }

    /// The shape of a kind's objects, compiled at the first call.
    pub(crate) fn root(&self, kind: &Kind) -> NodeId {
        if let Some(definition) = kind.definition {
            return definition.root();
        }
        let key = (kind.group, kind.version, kind.kind);
        if let Some(root) = self.roots.read().get(&key) {
            return *root;
        }
        let mut definitions = self.definitions.lock();
        if let Some(root) = self.roots.read().get(&key) {
            return *root;
        }
        let root = compile::compile(kind, &mut definitions);
        self.roots.write().insert(key, root);
        root
    }

    /// The shape of a custom kind's objects, by its structural schema.
    pub(crate) fn custom_root(&self, name: &str, schema: &serde_json::Value) -> NodeId {
        compile::compile_custom(name, schema, &mut self.definitions.lock())
    }

    /// The field of a struct; `None` for unknown fields and for other nodes.
    pub(crate) fn field(&self, id: NodeId, name: &str) -> Option<&'static Field> {
        match self.node(id) {
            Node::Struct(shape) => shape.fields.get(name),
            _ => None,
        }
    }
}
