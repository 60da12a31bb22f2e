//! The shape of every kind: fields, types, and how lists and maps merge.
//!
//! The shapes come from the kinds' own schemas (`schemars`), the merge rules from upstream's OpenAPI document
//! (`merge_keys.json`: definition, then field). They are built once, at the first write, into one arena without
//! the descriptions; unknown fields, strategic merge and server-side apply all read this arena.

mod compile;
mod describe;
mod normalise;

use std::sync::LazyLock;

use hashbrown::HashMap;

pub(crate) use compile::definitions;
pub(crate) use normalise::{Findings, normalise};

use crate::registry::Kind;

/// Where a node is in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NodeId(u32);

/// The shape of one value.
#[derive(Debug)]
pub(crate) enum Node {
    /// Anything at all (`FieldsV1`, `RawExtension`).
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
    pub(crate) required: Vec<Box<str>>,
}

/// A field of a struct, and how it merges.
#[derive(Debug)]
pub(crate) struct Field {
    pub(crate) node: NodeId,
    pub(crate) merge: Merge,
}

/// How a field's value merges. Built from `x-kubernetes-patch-*`, `-list-*` and `-map-type`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Merge {
    /// Strategic merge: lists merge (by `merge_key`, or as a set of primitives) instead of being replaced.
    pub(crate) patch_merge: bool,
    pub(crate) patch_replace: bool,
    pub(crate) merge_key: Option<Box<str>>,
    /// Server-side apply: what a list's items are told apart by.
    pub(crate) list: ListType,
    /// Server-side apply: the map, or struct, has one owner on the whole.
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

/// All shapes.
pub(crate) struct Schemas {
    nodes: Vec<Node>,
    roots: HashMap<(&'static str, &'static str, &'static str), NodeId>,
}

static SCHEMAS: LazyLock<Schemas> = LazyLock::new(compile::compile);

pub(crate) fn schemas() -> &'static Schemas {
    &SCHEMAS
}

impl Schemas {
    pub(crate) fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.0 as usize]
    }

    /// The shape of a kind's objects.
    pub(crate) fn root(&self, kind: &Kind) -> NodeId {
        self.roots[&(kind.group, kind.version, kind.kind)]
    }

    /// The field of a struct; `None` for unknown fields and for what is no struct.
    pub(crate) fn field(&self, id: NodeId, name: &str) -> Option<&Field> {
        match self.node(id) {
            Node::Struct(shape) => shape.fields.get(name),
            _ => None,
        }
    }
}
