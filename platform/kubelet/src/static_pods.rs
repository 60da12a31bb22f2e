//! Static pods: each manifest in a folder of the node is a pod of this node as long as its file exists.
//!
//! Each has an object with upstream's annotations of a mirror pod. A deleted object is created again; a changed file
//! replaces the object, and a removed file removes it. [`plan`] decides, purely.

use std::{fs, io, path::PathBuf, time::Duration};

use kube::{
    Api, Client,
    api::{DeleteParams, PostParams, Preconditions},
};
use mayfly_api::{
    ObjectKey,
    k8s::{
        api::core::v1::{Node, Pod, Toleration},
        apimachinery::pkg::apis::meta::v1::OwnerReference,
    },
};
use mayfly_informer::Informer;
use sha2::{Digest as _, Sha256};
use tokio::{task::spawn_blocking, time::sleep};
use tokio_util::sync::CancellationToken;

/// The interval of reading the folder (upstream: 20 s).
const SCAN_EVERY: Duration = Duration::from_secs(2);
/// Limits of the number and the size in bytes of manifests: far above handwritten ones.
const FILES_MAX: usize = 256;
const FILE_BYTES_MAX: u64 = 1 << 20;
/// Upstream's annotations.
const ANNOTATION_SOURCE: &str = "kubernetes.io/config.source";
const ANNOTATION_HASH: &str = "kubernetes.io/config.hash";
const ANNOTATION_MIRROR: &str = "kubernetes.io/config.mirror";

/// Keeps the static pods of one node.
pub(crate) struct StaticPods {
    pub(crate) folder: PathBuf,
    pub(crate) node: String,
    pub(crate) client: Client,
    pub(crate) pods: Informer<Pod>,
    pub(crate) nodes: Informer<Node>,
}

/// The action for one pod.
#[derive(Clone, Debug, PartialEq)]
enum StaticPodStep {
    Create(Box<Pod>),
    Delete { key: ObjectKey, uid: Option<String> },
}

impl StaticPods {
    /// Follows the folder until `stop`. A missing folder counts as empty.
    pub(crate) async fn run(&self, stop: &CancellationToken) {
        tokio::select! {
            () = self.pods.synced() => {}
            () = stop.cancelled() => return,
        }
        let mut complaints: Vec<String> = Vec::new();
        loop {
            let (folder, node) = (self.folder.clone(), self.node.clone());
            // Fails only when the Tokio runtime shuts down.
            let Ok(read) = spawn_blocking(move || read_folder(&folder, &node)).await else { return };
            match read {
                Ok((wanted, problems)) => {
                    for problem in problems.iter().filter(|problem| !complaints.contains(problem)) {
                        tracing::warn!(problem, "a manifest of a static pod cannot be used");
                    }
                    complaints = problems;
                    for step in plan(&wanted, &self.mirrors()) {
                        self.act(step).await;
                    }
                }
                Err(error) => {
                    tracing::warn!(folder = %self.folder.display(), %error, "cannot read the folder of static pods");
                }
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = sleep(SCAN_EVERY) => {}
            }
        }
    }

    /// The objects of this node's static pods.
    fn mirrors(&self) -> Vec<std::sync::Arc<Pod>> {
        let mut pods = self.pods.list();
        pods.retain(|pod| {
            let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
            node == Some(self.node.as_str()) && is_static(pod)
        });
        pods
    }

    /// The node as the owner of its mirror pods (as upstream; the API server requires it of nodes).
    fn owner(&self) -> Option<OwnerReference> {
        let node = self.nodes.get(&ObjectKey::cluster(&self.node))?;
        Some(OwnerReference {
            api_version: "v1".into(),
            kind: "Node".into(),
            name: self.node.clone(),
            uid: node.metadata.uid.clone()?,
            controller: Some(true),
            ..OwnerReference::default()
        })
    }

    async fn act(&self, step: StaticPodStep) {
        let done = match &step {
            StaticPodStep::Create(pod) => {
                let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
                let api: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
                // Until the node is registered, its static pods have no object: the next scan creates it.
                let Some(owner) = self.owner() else { return };
                let mut pod = pod.clone();
                pod.metadata.owner_references = Some(vec![owner]);
                api.create(&PostParams::default(), &pod).await.map(drop)
            }
            StaticPodStep::Delete { key, uid } => {
                let api: Api<Pod> = Api::namespaced(self.client.clone(), &key.namespace);
                let preconditions = Preconditions { uid: uid.clone(), resource_version: None };
                let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
                api.delete(&key.name, &params).await.map(drop)
            }
        };
        match done {
            Ok(()) => {}
            // The informer lags: the next scan sees the change.
            Err(kube::Error::Api(status)) if status.is_already_exists() || status.is_not_found() => {}
            Err(error) => tracing::warn!(?step, %error, "cannot update a static pod; will try again"),
        }
    }
}

/// Whether the pod is the object of a static pod.
pub(crate) fn is_static(pod: &Pod) -> bool {
    annotation(pod, ANNOTATION_MIRROR).is_some()
}

fn annotation<'a>(pod: &'a Pod, name: &str) -> Option<&'a String> {
    pod.metadata.annotations.as_ref()?.get(name)
}

/// Deletes mirror pods whose file was removed or changed, creates those without an object.
fn plan(wanted: &[Pod], mirrors: &[std::sync::Arc<Pod>]) -> Vec<StaticPodStep> {
    let mut steps = Vec::new();
    for mirror in mirrors {
        let key = ObjectKey::of(&**mirror);
        let file = wanted.iter().find(|pod| ObjectKey::of(*pod) == key);
        let is_same =
            file.is_some_and(|pod| annotation(pod, ANNOTATION_HASH) == annotation(mirror, ANNOTATION_MIRROR));
        if !is_same && mirror.metadata.deletion_timestamp.is_none() {
            steps.push(StaticPodStep::Delete { key, uid: mirror.metadata.uid.clone() });
        }
    }
    let is_there = |pod: &Pod| mirrors.iter().any(|mirror| ObjectKey::of(&**mirror) == ObjectKey::of(pod));
    let absent = wanted.iter().filter(|pod| !is_there(pod));
    steps.extend(absent.map(|pod| StaticPodStep::Create(Box::new(pod.clone()))));
    steps
}

/// The pods of a folder's manifests, and messages about invalid manifests. Blocks.
fn read_folder(folder: &std::path::Path, node: &str) -> io::Result<(Vec<Pod>, Vec<String>)> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Default::default()),
        entries => entries?,
    };
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    // Skips hidden files, which editors create.
    paths.retain(|path| path.file_name().is_some_and(|name| !name.to_string_lossy().starts_with('.')));
    paths.sort();
    let (mut pods, mut problems) = (Vec::new(), Vec::new());
    for path in paths.iter().filter(|path| path.is_file()).take(FILES_MAX) {
        match fs::metadata(path)?.len() {
            0..=FILE_BYTES_MAX => match static_pod(&fs::read_to_string(path)?, node) {
                Ok(pod) => pods.push(pod),
                Err(why) => problems.push(format!("{}: {why}", path.display())),
            },
            bytes => problems.push(format!("{}: the file is too large ({bytes} bytes)", path.display())),
        }
    }
    Ok((pods, problems))
}

/// The pod object of a manifest in YAML or JSON.
fn static_pod(text: &str, node: &str) -> Result<Pod, String> {
    let value: serde_json::Value = serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
    if value["kind"] != "Pod" {
        return Err(format!("the kind is not Pod but {}", value["kind"]));
    }
    let mut pod: Pod = serde_json::from_value(value).map_err(|error| error.to_string())?;
    let name = pod.metadata.name.clone().filter(|name| !name.is_empty()).ok_or("metadata.name is missing")?;
    let spec = pod.spec.as_mut().ok_or("spec is missing")?;
    spec.node_name = Some(node.to_owned());
    // Taints must not evict a static pod: only removing its file ends it.
    let stays = Toleration {
        operator: Some("Exists".into()),
        effect: Some("NoExecute".into()),
        ..Toleration::default()
    };
    spec.tolerations.get_or_insert_default().push(stays);
    let hash = hex::encode(&Sha256::digest(text)[..16]);
    pod.metadata.name = Some(format!("{name}-{}", node.to_lowercase()));
    pod.metadata.namespace.get_or_insert_with(|| "default".into());
    let annotations = pod.metadata.annotations.get_or_insert_default();
    for (key, value) in
        [(ANNOTATION_SOURCE, "file"), (ANNOTATION_HASH, hash.as_str()), (ANNOTATION_MIRROR, hash.as_str())]
    {
        annotations.insert(key.to_owned(), value.to_owned());
    }
    Ok(pod)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    const MANIFEST: &str =
        "apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nspec:\n  containers: [{name: c, image: x}]\n";

    #[test]
    fn a_manifest_becomes_a_pod_of_this_node() {
        let pod = static_pod(MANIFEST, "Node1").unwrap();
        assert_eq!(ObjectKey::of(&pod), ObjectKey::new("default", "web-node1"));
        assert_eq!(pod.spec.as_ref().unwrap().node_name.as_deref(), Some("Node1"));
        assert_eq!(annotation(&pod, ANNOTATION_SOURCE).unwrap(), "file");
        assert!(static_pod("kind: Service", "n").unwrap_err().contains("Service"));
        assert!(
            static_pod("kind: Pod\nmetadata: {}\nspec: {containers: []}", "n").unwrap_err().contains("name")
        );
        assert!(static_pod("\t{", "n").is_err());
    }

    #[test]
    fn a_folder_is_read_around_what_is_wrong_in_it() {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in [("a.yaml", MANIFEST), ("b.yaml", "kind: Service"), (".hidden", "x")] {
            fs::write(folder.path().join(name), text).unwrap();
        }
        fs::create_dir(folder.path().join("sub")).unwrap();
        let (pods, problems) = read_folder(folder.path(), "n").unwrap();
        assert_eq!((pods.len(), problems.len()), (1, 1), "{problems:?}");
        assert!(problems[0].contains("b.yaml"));
        assert!(read_folder(&folder.path().join("none"), "n").unwrap().0.is_empty());
    }

    #[test]
    fn objects_follow_the_files() {
        let pod = static_pod(MANIFEST, "n").unwrap();
        let changed = static_pod(&MANIFEST.replace("image: x", "image: z"), "n").unwrap();
        let mirror = |pod: &Pod| Arc::new(pod.clone());
        assert_eq!(plan(&[], &[]), []);
        assert_eq!(plan(std::slice::from_ref(&pod), &[]), [StaticPodStep::Create(Box::new(pod.clone()))]);
        assert_eq!(plan(std::slice::from_ref(&pod), &[mirror(&pod)]), []);
        let delete = StaticPodStep::Delete { key: ObjectKey::of(&pod), uid: None };
        assert_eq!(plan(&[], &[mirror(&pod)]), std::slice::from_ref(&delete));
        // The new pod is created after the old one is removed.
        assert_eq!(plan(std::slice::from_ref(&changed), &[mirror(&pod)]), [delete]);
        let mut going = pod.clone();
        going.metadata.deletion_timestamp = Some(mayfly_api::k8s::apimachinery::pkg::apis::meta::v1::Time(
            mayfly_api::k8s::jiff::Timestamp::now(),
        ));
        assert_eq!(plan(std::slice::from_ref(&changed), &[mirror(&going)]), []);
    }
}
