//! The basic types of the store: objects, keys, revisions and changes.

use std::{cmp::Ordering, fmt, sync::Arc};

use bytes::Bytes;

/// A point in the history of the whole store; 0 is the empty store. Every write takes the next number. The writes of a
/// batch ([`Store::write_batch`](crate::Store::write_batch)) share one revision, the last of their numbers: at the
/// numbers before it, nothing of the batch is visible.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Revision(pub u64);

impl Revision {
    pub(crate) fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The name of an object. Ordered by resource, then namespace, then name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// The plural, with its group when it has one: `pods`, `functions.mayfly.dev`.
    pub resource: Arc<str>,
    /// Empty for an object of the whole cluster.
    pub namespace: Arc<str>,
    pub name: Arc<str>,
}

impl Key {
    pub fn new(
        resource: impl Into<Arc<str>>,
        namespace: impl Into<Arc<str>>,
        name: impl Into<Arc<str>>,
    ) -> Self {
        Self { resource: resource.into(), namespace: namespace.into(), name: name.into() }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.namespace {
            "" => write!(f, "{}/{}", self.resource, self.name),
            namespace => write!(f, "{}/{}/{}", self.resource, namespace, self.name),
        }
    }
}

/// One object as it was after one write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub key: Key,
    pub value: Bytes,
    /// The number of the write that created it. No two objects share it: in a batch it is not above the revision of the
    /// batch, for every other write it is the write's revision.
    pub created: Revision,
    /// The revision of the last write.
    pub modified: Revision,
}

/// The objects of a list or a watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Range {
    pub resource: Arc<str>,
    pub scope: Scope,
}

/// A part of a resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scope {
    All,
    Namespace(Arc<str>),
    /// One object, whether it exists or not.
    Object {
        namespace: Arc<str>,
        name: Arc<str>,
    },
}

impl Range {
    /// Every object of a resource.
    pub fn resource(resource: impl Into<Arc<str>>) -> Self {
        Self { resource: resource.into(), scope: Scope::All }
    }

    /// The objects of a resource in one namespace.
    pub fn namespace(resource: impl Into<Arc<str>>, namespace: impl Into<Arc<str>>) -> Self {
        Self { resource: resource.into(), scope: Scope::Namespace(namespace.into()) }
    }

    /// One object, whether it exists or not.
    pub fn key(key: &Key) -> Self {
        let scope = Scope::Object { namespace: key.namespace.clone(), name: key.name.clone() };
        Self { resource: key.resource.clone(), scope }
    }

    pub fn contains(&self, key: &Key) -> bool {
        self.resource == key.resource && self.scope.place(key) == Ordering::Equal
    }
}

impl Scope {
    /// Whether a key of the same resource sorts before, within or after the scope, which is contiguous in the order
    /// of keys.
    pub(crate) fn place(&self, key: &Key) -> Ordering {
        match self {
            Self::All => Ordering::Equal,
            Self::Namespace(namespace) => key.namespace.cmp(namespace),
            Self::Object { namespace, name } => (&key.namespace, &key.name).cmp(&(namespace, name)),
        }
    }
}

/// The effect of a write on an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    Created,
    Modified,
    Deleted,
}

/// One write, as watchers see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WriteEvent {
    pub kind: EventKind,
    /// The object after the write. For [`EventKind::Deleted`]: its last state, with `modified` set to
    /// the deletion's revision.
    pub entry: Arc<Entry>,
    /// The object before the write; `None` for [`EventKind::Created`].
    pub previous: Option<Arc<Entry>>,
    /// Events of one batch share it.
    pub revision: Revision,
}
