//! `mayfly delete --preview`: the objects that a deletion would take with it, as a tree.
//!
//! The rules are the garbage collector's: an object is deleted once each of its owners is deleted or absent, and stays
//! while another owner exists. A Namespace takes its objects with it, a CustomResourceDefinition those of its kind.

use std::collections::{BTreeSet, HashMap, HashSet};

use serde::Serialize;
use serde_json::Value;

use super::DeletionTarget;
use crate::{
    discovery::DiscoveredKind,
    output,
    server::{Server, is_not_found, with_query},
    session::Session,
};

const METADATA: &str = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";
const METADATA_LIST: &str = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";
/// The number of objects in one response.
const PAGE: &str = "5000";

/// An existing object.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct ExistingObject {
    api_version: String,
    kind: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    namespace: String,
    name: String,
    uid: String,
    /// The object stays until these are removed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    finalizers: Vec<String>,
    /// In kubectl's form, such as `function.mayfly.dev/hello`.
    #[serde(skip)]
    shown: String,
    /// `functions.mayfly.dev`.
    #[serde(skip)]
    resource: String,
    #[serde(skip)]
    owners: Vec<String>,
}

impl ExistingObject {
    fn of(kind: &DiscoveredKind, object: &Value) -> Self {
        let metadata = &object["metadata"];
        let text = |value: &Value| value.as_str().unwrap_or("").to_owned();
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        Self {
            api_version: kind.api_version(),
            kind: kind.kind.clone(),
            namespace: text(&metadata["namespace"]),
            name: text(&metadata["name"]),
            uid: text(&metadata["uid"]),
            finalizers: list(&metadata["finalizers"]).iter().map(text).collect(),
            shown: kind.full_name(metadata["name"].as_str().unwrap_or("")),
            resource: format!("{}.{}", kind.plural, kind.group),
            owners: list(&metadata["ownerReferences"]).iter().map(|owner| text(&owner["uid"])).collect(),
        }
    }

    /// Whether the deletion of this object deletes others that need not have it as an owner.
    fn is_container(&self) -> bool {
        let kind = (self.api_version.as_str(), self.kind.as_str());
        matches!(kind, ("v1", "Namespace") | ("apiextensions.k8s.io/v1", "CustomResourceDefinition"))
    }

    /// Whether this container contains the other object.
    fn contains(&self, other: &Self) -> bool {
        match self.kind.as_str() {
            "Namespace" => other.namespace == self.name,
            _ => other.resource == self.name,
        }
    }
}

/// The effect of a deletion. The numbers are positions in `objects`.
#[derive(Debug)]
struct Cascade<'a> {
    objects: &'a [ExistingObject],
    /// The objects that the command names.
    roots: Vec<usize>,
    /// The deleted objects below each deleted one, without roots.
    below: HashMap<usize, Vec<usize>>,
    deleted: HashSet<usize>,
    /// Objects that lose an owner and stay, and an owner that they keep.
    kept: Vec<(usize, usize)>,
}

impl<'a> Cascade<'a> {
    /// `roots`: uids of objects among `objects`.
    fn of(objects: &'a [ExistingObject], roots: &[String]) -> Self {
        let by_uid: HashMap<&str, usize> =
            objects.iter().enumerate().map(|(at, object)| (object.uid.as_str(), at)).collect();
        let mut seen = HashSet::new();
        let roots: Vec<usize> = roots
            .iter()
            .filter_map(|uid| by_uid.get(uid.as_str()).copied())
            .filter(|at| seen.insert(*at))
            .collect();
        let mut dependents: HashMap<usize, Vec<usize>> = HashMap::new();
        for (at, object) in objects.iter().enumerate() {
            for owner in object.owners.iter().filter_map(|uid| by_uid.get(uid.as_str())) {
                dependents.entry(*owner).or_default().push(at);
            }
        }
        let mut deleted: HashSet<usize> = roots.iter().copied().collect();
        let mut below: HashMap<usize, Vec<usize>> = HashMap::new();
        let mut losing = BTreeSet::new();
        let mut open = roots.clone();
        while let Some(at) = open.pop() {
            let owned = dependents.get(&at).into_iter().flatten().map(|at| (*at, true));
            let all = if objects[at].is_container() { objects } else { &[] };
            let contained = all.iter().enumerate().filter(|(_, other)| objects[at].contains(other));
            let contained = contained.map(|(other, _)| (other, false));
            for (dependent, is_owned) in owned.chain(contained) {
                let has_owner =
                    |uid: &String| by_uid.get(uid.as_str()).is_some_and(|at| !deleted.contains(at));
                if is_owned && objects[dependent].owners.iter().any(has_owner) {
                    losing.insert(dependent);
                } else if deleted.insert(dependent) {
                    open.push(dependent);
                }
            }
        }
        // An object is shown below its owner rather than below its namespace.
        let containers: Vec<usize> =
            deleted.iter().copied().filter(|at| objects[*at].is_container()).collect();
        for at in deleted.iter().copied().filter(|at| !roots.contains(at)) {
            let mut owners = objects[at].owners.iter().filter_map(|uid| by_uid.get(uid.as_str()).copied());
            let owner = owners.find(|owner| deleted.contains(owner));
            let container =
                || containers.iter().copied().find(|other| objects[*other].contains(&objects[at]));
            if let Some(parent) = owner.or_else(container) {
                below.entry(parent).or_default().push(at);
            }
        }
        let order = |at: &usize| (&objects[*at].shown, &objects[*at].namespace);
        below.values_mut().for_each(|list| list.sort_by(|a, b| order(a).cmp(&order(b))));
        let living = |at: usize| {
            let mut owners = objects[at].owners.iter().filter_map(|uid| by_uid.get(uid.as_str()).copied());
            owners.find(|owner| !deleted.contains(owner)).map(|owner| (at, owner))
        };
        let kept =
            losing.into_iter().filter(|at| !deleted.contains(at)).filter_map(living).collect::<Vec<_>>();
        Self { objects, roots, below, deleted, kept }
    }

    fn text(&self) -> String {
        let mut text = String::new();
        let mut printed = HashSet::new();
        // Those that own each other in a circle are below no root.
        let mut rest: Vec<usize> = self.deleted.iter().copied().collect();
        rest.sort_by(|a, b| self.objects[*a].shown.cmp(&self.objects[*b].shown));
        for at in self.roots.iter().chain(&rest) {
            self.print(*at, "", "", &mut printed, &mut text);
        }
        for (at, owner) in &self.kept {
            let (object, owner) = (&self.objects[*at].shown, &self.objects[*owner].shown);
            text.push_str(&format!("{object} stays, because it also belongs to {owner}\n"));
        }
        let count = self.deleted.len();
        text.push_str(&format!(
            "{count} {} would be deleted\n",
            if count == 1 { "object" } else { "objects" }
        ));
        text
    }

    /// Prints an object and those below it. Owners can be in a cycle, so each object is printed once.
    fn print(&self, at: usize, first: &str, rest: &str, printed: &mut HashSet<usize>, text: &mut String) {
        if !printed.insert(at) {
            return;
        }
        let object = &self.objects[at];
        text.push_str(first);
        text.push_str(&object.shown);
        if !object.finalizers.is_empty() {
            text.push_str(&format!("  (after its finalizers: {})", object.finalizers.join(", ")));
        }
        text.push('\n');
        let below = self.below.get(&at).map_or(&[][..], Vec::as_slice);
        for (index, child) in below.iter().enumerate() {
            let (first, next) =
                if index + 1 == below.len() { ("└─ ", "   ") } else { ("├─ ", "│  ") };
            self.print(*child, &format!("{rest}{first}"), &format!("{rest}{next}"), printed, text);
        }
    }

    fn data(&self) -> Value {
        let mut deleted: Vec<usize> = self.deleted.iter().copied().collect();
        deleted.sort_unstable();
        let deleted: Vec<_> = deleted.into_iter().map(|at| &self.objects[at]).collect();
        let kept: Vec<_> = self.kept.iter().map(|(at, _)| &self.objects[*at]).collect();
        serde_json::json!({"deleted": deleted, "kept": kept})
    }
}

/// Prints what the deletion of the objects would take with it, and deletes nothing.
///
/// # Errors
/// An object does not exist (unless `ignore_not_found`), or the server does not answer.
pub(super) async fn run(
    session: &Session,
    targets: &[DeletionTarget],
    ignore_not_found: bool,
) -> anyhow::Result<()> {
    let server = session.server().await?;
    let mut roots = Vec::new();
    for target in targets {
        match server.get_as(&target.kind.object(&target.namespace, &target.name), METADATA).await {
            Ok(object) => roots.push(ExistingObject::of(&target.kind, &object)),
            Err(error) if ignore_not_found && is_not_found(&error) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let kinds = session.discovery().await?.deletable();
    let lists = futures::future::join_all(kinds.iter().map(|kind| list(server, kind))).await;
    let mut objects: Vec<ExistingObject> = Vec::new();
    for (kind, list) in kinds.iter().zip(lists) {
        match list {
            Ok(found) => objects.extend(found),
            Err(error) => {
                output::note(format_args!("cannot list {}, so none of them are shown: {error}", kind.plural))
            }
        }
    }
    let uids: Vec<String> = roots.iter().map(|root| root.uid.clone()).collect();
    // An object of a kind that cannot be listed.
    let listed: HashSet<String> = objects.iter().map(|object| object.uid.clone()).collect();
    objects.extend(roots.into_iter().filter(|root| !listed.contains(&root.uid)));
    let cascade = Cascade::of(&objects, &uids);
    output::result(session.format(), &cascade.data(), || cascade.text())
}

/// All objects of a kind, in all namespaces.
async fn list(server: &Server, kind: &DiscoveredKind) -> Result<Vec<ExistingObject>, kube::Error> {
    let mut objects = Vec::new();
    let mut token: Option<String> = None;
    loop {
        let query = [("limit", Some(PAGE)), ("continue", token.as_deref())];
        let page = server.get_as(&with_query(&kind.collection(None), &query), METADATA_LIST).await?;
        let items = page["items"].as_array().map_or(&[][..], Vec::as_slice);
        objects.extend(items.iter().map(|item| ExistingObject::of(kind, item)));
        match page["metadata"]["continue"].as_str().filter(|token| !token.is_empty()) {
            Some(next) => token = Some(next.to_owned()),
            None => return Ok(objects),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(shown: &str, namespace: &str, owners: &[&str]) -> ExistingObject {
        let (kind, name) = shown.split_once('/').unwrap();
        ExistingObject {
            api_version: "v1".into(),
            kind: if kind == "namespace" { "Namespace".into() } else { kind.into() },
            namespace: namespace.into(),
            name: name.into(),
            uid: shown.into(),
            shown: shown.into(),
            owners: owners.iter().map(ToString::to_string).collect(),
            ..Default::default()
        }
    }

    #[test]
    fn dependents_are_a_tree_and_shared_ones_stay() {
        let mut objects = [
            object("pod/b", "n", &["set/s"]),
            object("pod/a", "n", &["set/s"]),
            object("set/s", "n", &["deployment/web"]),
            object("deployment/web", "n", &[]),
            object("deployment/other", "n", &[]),
            object("map/shared", "n", &["deployment/web", "deployment/other"]),
            object("map/left", "n", &["deployment/web", "deployment/gone"]),
        ];
        objects[1].finalizers = vec!["example.com/f".into()];
        let text = |roots: &[&str]| {
            let roots: Vec<_> = roots.iter().map(ToString::to_string).collect();
            Cascade::of(&objects, &roots).text()
        };
        assert_eq!(
            text(&["deployment/web"]),
            "deployment/web\n\
             ├─ map/left\n\
             └─ set/s\n   \
                ├─ pod/a  (after its finalizers: example.com/f)\n   \
                └─ pod/b\n\
             map/shared stays, because it also belongs to deployment/other\n\
             5 objects would be deleted\n"
        );
        assert_eq!(text(&["pod/b"]), "pod/b\n1 object would be deleted\n");
        let both = text(&["deployment/web", "deployment/other"]);
        assert!(both.contains("map/shared\n") && !both.contains("stays"), "{both}");
        assert!(both.ends_with("7 objects would be deleted\n"), "{both}");
    }

    #[test]
    fn a_namespace_takes_its_objects_and_cycles_end() {
        let objects = [
            object("namespace/n", "", &[]),
            object("set/s", "n", &["set/t"]),
            object("set/t", "n", &["set/s"]),
            object("pod/p", "n", &[]),
            object("pod/p2", "elsewhere", &[]),
        ];
        let cascade = Cascade::of(&objects, &["namespace/n".into()]);
        assert_eq!(cascade.deleted.len(), 4);
        assert_eq!(cascade.text(), "namespace/n\n└─ pod/p\nset/s\n└─ set/t\n4 objects would be deleted\n");
        assert_eq!(cascade.data()["deleted"].as_array().unwrap().len(), 4);
    }
}
