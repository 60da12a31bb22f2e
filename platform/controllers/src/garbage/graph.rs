//! The graph of owners and dependents, keyed by uid.
//!
//! An owner that a dependent names and that was not observed is *virtual*: it has the identity that the dependent
//! gave it, and has to be looked up at the API. Two dependents may name different identities of an owner; a "not
//! found" for one identity does not remove a node that was observed under another.

use std::collections::{BTreeSet, HashMap};

use mayfly_api::k8s::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};

use super::{FINALIZER_FOREGROUND, FINALIZER_ORPHAN};

/// An object's uid, as the API gave it.
pub(super) type Uid = String;

/// Full coordinates: a uid alone is not enough, since dependents may name the wrong kind or namespace.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct ObjectIdentity {
    pub(super) api_version: String,
    pub(super) kind: String,
    /// Empty for a cluster-scoped object.
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) uid: Uid,
}

impl ObjectIdentity {
    /// The owner a reference names, in the namespace of the object that holds the reference.
    pub(super) fn of_owner(owner: &OwnerReference, namespace: &str) -> Self {
        Self {
            api_version: owner.api_version.clone(),
            kind: owner.kind.clone(),
            namespace: namespace.into(),
            name: owner.name.clone(),
            uid: owner.uid.clone(),
        }
    }
}

/// The node of one object.
#[derive(Clone, Debug)]
pub(super) struct GraphNode {
    pub(super) identity: ObjectIdentity,
    pub(super) owners: Vec<OwnerReference>,
    pub(super) dependents: BTreeSet<Uid>,
    pub(super) being_deleted: bool,
    /// Whether it waits for the deletion of its dependents.
    pub(super) deleting_dependents: bool,
    /// Whether its dependents are kept.
    pub(super) orphaning: bool,
    /// Whether only dependents name it, and it was not observed.
    pub(super) is_virtual: bool,
}

/// The check of an object.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum CollectorWork {
    Delete(Uid),
    Orphan(Uid),
}

#[derive(Debug, Default)]
pub(super) struct Graph {
    nodes: HashMap<Uid, GraphNode>,
}

impl Graph {
    pub(super) fn get(&self, uid: &str) -> Option<&GraphNode> {
        self.nodes.get(uid)
    }

    #[cfg(test)]
    pub(super) fn uids(&self) -> impl Iterator<Item = &Uid> {
        self.nodes.keys()
    }

    /// The observed nodes of one kind, to which a new list is compared.
    pub(super) fn of_kind<'a>(
        &'a self,
        api_version: &'a str,
        kind: &'a str,
    ) -> impl Iterator<Item = &'a ObjectIdentity> {
        self.nodes
            .values()
            .filter(move |node| {
                !node.is_virtual && node.identity.api_version == api_version && node.identity.kind == kind
            })
            .map(|node| &node.identity)
    }

    /// The dependents that block the deletion of an owner in foreground deletion.
    pub(super) fn blocking_dependents(&self, uid: &str) -> Vec<&GraphNode> {
        let blocks = |dependent: &&GraphNode| {
            dependent.owners.iter().any(|owner| owner.uid == uid && owner.block_owner_deletion == Some(true))
        };
        self.dependents(uid).filter(blocks).collect()
    }

    pub(super) fn dependents(&self, uid: &str) -> impl Iterator<Item = &GraphNode> {
        let uids = self.nodes.get(uid).into_iter().flat_map(|node| &node.dependents);
        uids.filter_map(|uid| self.nodes.get(uid))
    }

    /// Records an object that was observed, for the first time or changed.
    pub(super) fn observe(&mut self, identity: ObjectIdentity, meta: &ObjectMeta) -> Vec<CollectorWork> {
        let has = |name: &str| meta.finalizers.iter().flatten().any(|finalizer| finalizer == name);
        let being_deleted = meta.deletion_timestamp.is_some();
        let orphaning = being_deleted && has(FINALIZER_ORPHAN);
        // With both finalizers, the dependents are orphaned first: then none is left that could be deleted.
        let deleting_dependents = being_deleted && has(FINALIZER_FOREGROUND) && !orphaning;
        let owners = meta.owner_references.as_deref().unwrap_or_default();
        let is_known = |node: &GraphNode| {
            let flags = (node.being_deleted, node.deleting_dependents, node.orphaning, node.is_virtual);
            flags == (being_deleted, deleting_dependents, orphaning, false)
                && node.identity == identity
                && node.owners == owners
        };
        // Most changes do not affect the graph.
        if self.nodes.get(&identity.uid).is_some_and(is_known) {
            return Vec::new();
        }
        let uid = identity.uid.clone();
        let owners = owners.to_vec();
        let old = self.nodes.get(&uid).cloned();
        let known = old.as_ref();
        let mut work = Vec::new();

        let dependents = known.map(|node| node.dependents.clone()).unwrap_or_default();
        // Dependents that name this owner elsewhere are checked again: for them it is absent.
        if let Some(node) = known.filter(|node| node.is_virtual && node.identity != identity) {
            work.extend(node.dependents.iter().cloned().map(CollectorWork::Delete));
        }
        let old_owners = known.map(|node| node.owners.clone()).unwrap_or_default();
        let node = GraphNode {
            identity,
            owners: owners.clone(),
            dependents,
            being_deleted,
            deleting_dependents,
            orphaning,
            is_virtual: false,
        };
        let namespace = node.identity.namespace.clone();
        let first_seen = known.is_none_or(|node| node.is_virtual);
        self.nodes.insert(uid.clone(), node);
        work.extend(self.link(&uid, &namespace, &old_owners, &owners));
        work.extend(unblocked(&old_owners, &owners));

        let was = |flag: fn(&GraphNode) -> bool| known.is_some_and(flag);
        if orphaning && !was(|node| node.orphaning) {
            work.push(CollectorWork::Orphan(uid.clone()));
        }
        if deleting_dependents && !was(|node| node.deleting_dependents) {
            // Its dependents are deleted first, then the object.
            work.extend(self.dependents(&uid).map(|node| CollectorWork::Delete(node.identity.uid.clone())));
            work.push(CollectorWork::Delete(uid.clone()));
        } else if !owners.is_empty() && (first_seen || old_owners != owners) && !being_deleted {
            // Owners are checked at the API only if one of them was never observed.
            if owners.iter().any(|owner| {
                self.nodes.get(&owner.uid).is_none_or(|node| conflicts_with_owner(node, owner, &namespace))
            }) {
                work.push(CollectorWork::Delete(uid));
            }
        }
        work
    }

    /// Removes an object after its deletion: by a watch event (`seen`), or by a read of a virtual node.
    pub(super) fn remove(&mut self, identity: &ObjectIdentity, seen: bool) -> Vec<CollectorWork> {
        let Some(node) = self.nodes.get(&identity.uid) else { return Vec::new() };
        if !seen && node.identity != *identity {
            // Only this identity is absent. Dependents that name it are checked again; the node stays.
            let named_it = self.dependents(&identity.uid).filter(|dependent| {
                let namespace = &dependent.identity.namespace;
                dependent.owners.iter().any(|owner| {
                    owner.uid == identity.uid
                        && owner.kind == identity.kind
                        && owner.api_version == identity.api_version
                        && owner.name == identity.name
                        && (identity.namespace.is_empty() || identity.namespace == *namespace)
                })
            });
            return named_it.map(|dependent| CollectorWork::Delete(dependent.identity.uid.clone())).collect();
        }
        let other = if seen || !node.is_virtual { None } else { self.alternate_identity(node) };
        if let Some(other) = other
            && let Some(node) = self.nodes.get_mut(&identity.uid)
        {
            // Some dependents name another identity: look that up next.
            node.identity = other;
            let dependents = node.dependents.clone().into_iter().map(CollectorWork::Delete);
            return dependents.chain([CollectorWork::Delete(identity.uid.clone())]).collect();
        }
        let Some(node) = self.nodes.remove(&identity.uid) else { return Vec::new() };
        let mut work: Vec<_> = node.dependents.iter().cloned().map(CollectorWork::Delete).collect();
        work.extend(self.link(&identity.uid, &identity.namespace, &node.owners, &[]));
        // An owner in foreground deletion may have waited for this one.
        work.extend(self.waiting_owners(&node.owners));
        work
    }

    /// Makes the nodes of a kind virtual, because the kind is not watched any more. Nodes that no object names are
    /// removed.
    pub(super) fn unobserve(&mut self, api_version: &str, kind: &str) -> Vec<CollectorWork> {
        let known: Vec<_> = self.of_kind(api_version, kind).cloned().collect();
        let mut work = Vec::new();
        for identity in known {
            let Some(node) = self.nodes.get_mut(&identity.uid) else { continue };
            let owners = std::mem::take(&mut node.owners);
            node.being_deleted = false;
            node.deleting_dependents = false;
            node.orphaning = false;
            node.is_virtual = true;
            if node.dependents.is_empty() {
                self.nodes.remove(&identity.uid);
            } else {
                work.push(CollectorWork::Delete(identity.uid.clone()));
            }
            work.extend(self.link(&identity.uid, &identity.namespace, &owners, &[]));
            work.extend(self.waiting_owners(&owners));
        }
        work
    }

    /// The owners that wait in foreground deletion for their dependents.
    fn waiting_owners(&self, owners: &[OwnerReference]) -> Vec<CollectorWork> {
        let waits =
            |owner: &&OwnerReference| self.nodes.get(&owner.uid).is_some_and(|node| node.deleting_dependents);
        owners.iter().filter(waits).map(|owner| CollectorWork::Delete(owner.uid.clone())).collect()
    }

    /// An identity that some dependent gives to the node, other than the one it has, and after it in order (so that
    /// the lookups terminate).
    fn alternate_identity(&self, node: &GraphNode) -> Option<ObjectIdentity> {
        let identities = self.dependents(&node.identity.uid).flat_map(|dependent| {
            let namespace = dependent.identity.namespace.clone();
            let names_it = dependent.owners.iter().filter(|owner| owner.uid == node.identity.uid);
            names_it.map(move |owner| ObjectIdentity::of_owner(owner, &namespace))
        });
        identities.filter(|identity| *identity > node.identity).min()
    }

    /// Keeps both directions of ownership consistent. A new owner that was not observed becomes virtual.
    fn link(
        &mut self,
        uid: &Uid,
        namespace: &str,
        old: &[OwnerReference],
        new: &[OwnerReference],
    ) -> Vec<CollectorWork> {
        let mut work = Vec::new();
        for owner in old {
            if new.iter().any(|kept| kept.uid == owner.uid) {
                continue;
            }
            let forgotten = self.nodes.get_mut(&owner.uid).is_some_and(|node| {
                node.dependents.remove(uid);
                node.is_virtual && node.dependents.is_empty()
            });
            if forgotten {
                self.nodes.remove(&owner.uid);
            }
        }
        for owner in new {
            let node = self.nodes.entry(owner.uid.clone()).or_insert_with(|| {
                work.push(CollectorWork::Delete(owner.uid.clone()));
                GraphNode {
                    identity: ObjectIdentity::of_owner(owner, namespace),
                    owners: Vec::new(),
                    dependents: BTreeSet::new(),
                    being_deleted: false,
                    deleting_dependents: false,
                    orphaning: false,
                    is_virtual: true,
                }
            });
            node.dependents.insert(uid.clone());
            // A dependent that is added while its owner waits for the deletion of dependents is deleted, too.
            if node.deleting_dependents {
                work.push(CollectorWork::Delete(uid.clone()));
            }
        }
        work
    }
}

/// Whether a reference disagrees with the observed owner.
fn conflicts_with_owner(node: &GraphNode, owner: &OwnerReference, namespace: &str) -> bool {
    let identity = &node.identity;
    let elsewhere = !identity.namespace.is_empty() && identity.namespace != namespace;
    node.is_virtual || elsewhere || identity.kind != owner.kind || identity.name != owner.name
}

/// Owners that a change of references stopped blocking: their deletion may proceed.
fn unblocked(old: &[OwnerReference], new: &[OwnerReference]) -> Vec<CollectorWork> {
    let blocks = |owner: &&OwnerReference| owner.block_owner_deletion == Some(true);
    let still = |owner: &&OwnerReference| new.iter().filter(blocks).any(|kept| kept.uid == owner.uid);
    old.iter()
        .filter(blocks)
        .filter(|owner| !still(owner))
        .map(|owner| CollectorWork::Delete(owner.uid.clone()))
        .collect()
}
