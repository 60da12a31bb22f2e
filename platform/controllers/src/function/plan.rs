//! Plans a function: from a snapshot to steps; pure.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use kube::Resource as _;
use mayfly_api::{
    ComponentState, ComponentStatus, Digest, Function, Revision, RevisionSpec,
    env::EnvError,
    function::{TrafficTarget, replica_labels},
    k8s::{
        api::{
            apps::v1::{ReplicaSet, ReplicaSetSpec},
            core::v1::{
                Container, ContainerPort, EnvVar, Pod, PodSpec, PodTemplateSpec, ResourceRequirements,
            },
        },
        apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta},
    },
    revision_name, revision_number, wellknown,
};

use crate::metadata::{controller_of, uid};

/// A snapshot of one function and its dependents.
pub(super) struct FunctionSnapshot {
    pub(super) function: Arc<Function>,
    /// The function's revisions, by number.
    pub(super) revisions: BTreeMap<u32, RevisionState>,
    /// Revisions of this function without an owner: an earlier deletion of the function orphaned them.
    pub(super) orphans: Vec<Arc<Revision>>,
    /// A revision of another owner has the name that the next one would get: the leftover of a deleted
    /// function of this name, which the garbage collector is about to remove.
    pub(super) name_taken: bool,
    /// Hosts that the function's tags ask for and do not get.
    pub(super) lost_hosts: Vec<LostHost>,
    /// The component of a source in a registry, if a new revision needs it; or the reason why it could not be
    /// fetched.
    pub(super) fetched: Option<Result<Digest, String>>,
}

/// A host that a tag of the function claims, and its holder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LostHost {
    pub(super) tag: String,
    /// `<tag>-<function>`, the host's first label.
    pub(super) label: String,
    /// `function canary-split`, `tag a of function b-c`.
    pub(super) holder: String,
}

/// A revision and its dependents.
pub(super) struct RevisionState {
    pub(super) revision: Arc<Revision>,
    pub(super) replica_set: Option<Arc<ReplicaSet>>,
    pub(super) readiness: Readiness,
}

/// Whether a revision can answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Readiness {
    Ready,
    /// No runtime of this node can run the source.
    RuntimeMissing {
        source: &'static str,
    },
    ComponentMissing {
        digest: String,
    },
    /// The component exists and is being compiled.
    Compiling {
        /// The progress, if compiling takes long.
        message: Option<String>,
    },
    /// A ConfigMap or Secret that its environment names is not there, or lacks the key.
    EnvironmentMissing {
        message: String,
    },
    /// The component exists, but the node that compiles it, or its pods, report that it cannot run.
    ComponentInvalid {
        message: String,
    },
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Step {
    /// Records the number on the function, so that no later revision gets it.
    TakeNumber(u32),
    CreateRevision(Box<Revision>),
    /// Makes an orphan the function's own (as upstream's controllers adopt what fits their selector).
    AdoptRevision(Arc<Revision>),
    CreateReplicaSet(Box<ReplicaSet>),
    /// Raises a ReplicaSet to `scaling.min`.
    RaiseReplicas {
        replica_set: String,
        replicas: i32,
    },
    DeleteRevision {
        name: String,
        uid: String,
    },
    /// Wait for the garbage collector to remove the leftover revision.
    AwaitCollector,
}

impl FunctionSnapshot {
    pub(super) fn name(&self) -> &str {
        self.function.metadata.name.as_deref().unwrap_or_default()
    }

    pub(super) fn latest(&self) -> Option<&RevisionState> {
        self.revisions.values().next_back()
    }

    /// The newest revision that can answer. A revision that was ready stays the latest one when a ConfigMap or a
    /// Secret of its environment is deleted, as a running pod keeps its values: a deletion must not bring older code
    /// back.
    pub(super) fn latest_ready(&self) -> Option<&RevisionState> {
        let named = self.function.status.as_ref().and_then(|status| status.latest_ready_revision.as_deref());
        self.revisions.values().rev().find(|state| match &state.readiness {
            Readiness::Ready => true,
            Readiness::EnvironmentMissing { .. } => named == Some(state.name()),
            _ => false,
        })
    }

    pub(super) fn revision(&self, name: &str) -> Option<&RevisionState> {
        self.revisions.get(&revision_number(self.name(), name)?).filter(|state| state.name() == name)
    }

    /// The traffic targets, with the default made explicit.
    pub(super) fn targets(&self) -> Vec<TrafficTarget> {
        if self.function.spec.traffic.is_empty() {
            return vec![TrafficTarget {
                latest: Some(true),
                percent: Some(100),
                ..TrafficTarget::default()
            }];
        }
        self.function.spec.traffic.clone()
    }

    /// The revision that a target refers to, if it exists (and, for the latest, is ready).
    pub(super) fn resolve(&self, target: &TrafficTarget) -> Option<&RevisionState> {
        match &target.revision {
            Some(name) => self.revision(name),
            None => self.latest_ready(),
        }
    }

    fn gets_traffic(&self, state: &RevisionState) -> bool {
        self.targets().iter().any(|target| self.resolve(target).is_some_and(|to| std::ptr::eq(to, state)))
    }

    /// The highest revision number that was allocated, as recorded on the function.
    pub(super) fn number_taken(&self) -> u32 {
        let annotations = self.function.metadata.annotations.as_ref();
        let text = annotations.and_then(|annotations| annotations.get(wellknown::ANNOTATION_GENERATION));
        // Any user may write the annotation: a number above the maximum is ignored.
        text.and_then(|text| text.parse().ok()).filter(|number| *number <= NUMBER_MAX).unwrap_or(0)
    }

    pub(super) fn newest_number(&self) -> u32 {
        self.revisions.keys().next_back().copied().unwrap_or(0)
    }

    pub(super) fn next_number(&self) -> u32 {
        self.number_taken().max(self.newest_number()).saturating_add(1)
    }

    /// The revision for the function's spec.
    fn wanted(&self) -> RevisionSpec {
        let mut spec = RevisionSpec::from_function(self.name(), &self.function.spec);
        if spec.source.oci.is_some() {
            // A revision is immutable: it has the component that the reference named at its creation.
            spec.source.component = self.fetched.as_ref().and_then(|fetched| fetched.clone().ok());
        }
        spec
    }

    /// Whether a revision can be created now: an artifact in a registry must have been fetched.
    fn has_source(&self) -> bool {
        self.function.spec.source.oci.is_none() || matches!(self.fetched, Some(Ok(_)))
    }

    pub(super) fn needs_revision(&self) -> bool {
        self.latest().is_none_or(|state| {
            let (mut has, mut wanted) = (state.revision.spec.clone(), self.wanted());
            if wanted.source.oci.is_some() && has.source.component.is_some() {
                // A moved tag does not lead to a new revision; another reference does.
                (has.source.component, wanted.source.component) = (None, None);
            } else if wanted.source.oci.is_some() {
                return true;
            }
            has != wanted
        })
    }
}

/// Enough for a deployment each second for thirty years.
const NUMBER_MAX: u32 = 1_000_000_000;

impl RevisionState {
    pub(super) fn name(&self) -> &str {
        self.revision.metadata.name.as_deref().unwrap_or_default()
    }

    pub(super) fn ready_replicas(&self) -> i32 {
        let status = self.replica_set.as_ref().and_then(|set| set.status.as_ref());
        status.and_then(|status| status.ready_replicas).unwrap_or(0)
    }
}

/// The steps that bring the function's objects in step with its spec.
pub(super) fn plan(snapshot: &FunctionSnapshot, history_max: usize) -> Vec<Step> {
    if snapshot.function.metadata.deletion_timestamp.is_some() {
        return Vec::new();
    }
    if !snapshot.orphans.is_empty() {
        // The adopted revisions are planned in the next round.
        return snapshot.orphans.iter().cloned().map(Step::AdoptRevision).collect();
    }
    let mut steps = Vec::new();
    if snapshot.needs_revision() {
        if snapshot.name_taken {
            return vec![Step::AwaitCollector];
        }
        if snapshot.has_source() {
            let number = snapshot.next_number();
            steps.push(Step::TakeNumber(number));
            steps.push(Step::CreateRevision(Box::new(new_revision(snapshot, number))));
            // The ReplicaSet follows when the revision has been observed.
        }
    }
    for state in snapshot.revisions.values() {
        steps.extend(replica_set_step(snapshot, state));
    }
    steps.extend(history(snapshot, history_max));
    steps
}

fn replica_set_step(snapshot: &FunctionSnapshot, state: &RevisionState) -> Option<Step> {
    if state.revision.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let min = i32::try_from(state.revision.spec.scaling.min).unwrap_or(i32::MAX);
    let floor = if snapshot.gets_traffic(state) { min } else { 0 };
    match &state.replica_set {
        None if state.readiness == Readiness::Ready => {
            Some(Step::CreateReplicaSet(Box::new(new_replica_set(&state.revision, floor)?)))
        }
        None => None,
        Some(set) => {
            let replicas = set.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1);
            (replicas < floor)
                .then(|| Step::RaiseReplicas { replica_set: state.name().into(), replicas: floor })
        }
    }
}

/// Deletes the oldest revisions that are not needed, beyond the limit.
fn history(snapshot: &FunctionSnapshot, history_max: usize) -> Vec<Step> {
    let latest = snapshot.latest().map(RevisionState::name);
    let spare: Vec<_> = snapshot
        .revisions
        .values()
        .filter(|state| {
            Some(state.name()) != latest
                && !snapshot.gets_traffic(state)
                && snapshot.latest_ready().is_none_or(|ready| ready.name() != state.name())
        })
        .collect();
    let surplus = spare.len().saturating_sub(history_max);
    let mut steps = Vec::new();
    for state in spare.into_iter().take(surplus) {
        if state.revision.metadata.deletion_timestamp.is_none() {
            let uid = uid(&*state.revision).to_owned();
            steps.push(Step::DeleteRevision { name: state.name().into(), uid });
        }
    }
    steps
}

fn new_revision(snapshot: &FunctionSnapshot, number: u32) -> Revision {
    let name = revision_name(snapshot.name(), number);
    let mut revision = Revision::new(&name, snapshot.wanted());
    revision.metadata.namespace = snapshot.function.metadata.namespace.clone();
    revision.metadata.labels = Some(replica_labels(snapshot.name(), &name));
    revision.metadata.owner_references = snapshot.function.controller_owner_ref(&()).map(|owner| vec![owner]);
    revision
}

/// The ReplicaSet of a revision whose source is a component or an image; `None` for any other source.
pub(super) fn new_replica_set(revision: &Revision, replicas: i32) -> Option<ReplicaSet> {
    let source = &revision.spec.source;
    let (image, runtime_class) = match (source.component, &source.image) {
        (Some(component), _) => {
            let image = format!("{}{}", wellknown::COMPONENT_IMAGE_PREFIX, component.hex());
            (image, Some(wellknown::RUNTIME_CLASS_WASM.to_owned()))
        }
        (None, Some(image)) => (image.clone(), None),
        (None, None) => return None,
    };
    let port = source.port.unwrap_or(wellknown::FUNCTION_PORT);
    let name = revision.metadata.name.clone()?;
    let labels = replica_labels(&revision.spec.function, &name);
    let spec = &revision.spec;
    let container = Container {
        name: wellknown::FUNCTION_CONTAINER.into(),
        image: Some(image),
        command: some_list(&source.command),
        args: some_list(&source.args),
        env: environment(revision, &name, port),
        ports: Some(vec![ContainerPort {
            container_port: port.into(),
            name: Some("http".into()),
            protocol: Some("TCP".into()),
            ..ContainerPort::default()
        }]),
        resources: Some(ResourceRequirements {
            limits: Some([("memory".to_owned(), spec.limits.memory.clone())].into()),
            ..ResourceRequirements::default()
        }),
        ..Container::default()
    };
    let pod = PodSpec {
        containers: vec![container],
        runtime_class_name: runtime_class,
        automount_service_account_token: Some(false),
        // As Knative does: Services that come and go must not make two replicas of one revision different.
        enable_service_links: Some(false),
        termination_grace_period_seconds: Some(whole_seconds(spec.limits.timeout.0)),
        ..PodSpec::default()
    };
    let template_metadata = ObjectMeta { labels: Some(labels.clone()), ..ObjectMeta::default() };
    Some(ReplicaSet {
        metadata: ObjectMeta {
            name: Some(name),
            namespace: revision.metadata.namespace.clone(),
            labels: Some(labels.clone()),
            owner_references: revision.controller_owner_ref(&()).map(|owner| vec![owner]),
            ..ObjectMeta::default()
        },
        spec: Some(ReplicaSetSpec {
            replicas: Some(replicas),
            selector: LabelSelector { match_labels: Some(labels), match_expressions: None },
            template: Some(PodTemplateSpec { metadata: Some(template_metadata), spec: Some(pod) }),
            min_ready_seconds: None,
        }),
        status: None,
    })
}

/// The environment of a replica. A container also gets the variables of Knative's container contract: the port to
/// listen on, its service and its revision. A variable of the spec with the same name takes precedence.
fn environment(revision: &Revision, name: &str, port: u16) -> Option<Vec<EnvVar>> {
    let spec = &revision.spec;
    let mut env = Vec::new();
    if spec.source.image.is_some() {
        let told =
            [("PORT", port.to_string()), ("K_SERVICE", spec.function.clone()), ("K_REVISION", name.into())];
        let is_set = |name: &str| spec.env.iter().any(|variable| variable.name == name);
        let variable = |(name, value): (&str, String)| EnvVar {
            name: name.into(),
            value: Some(value),
            value_from: None,
        };
        env.extend(told.into_iter().filter(|(name, _)| !is_set(name)).map(variable));
    }
    env.extend(spec.env.iter().cloned());
    (!env.is_empty()).then_some(env)
}

fn some_list(list: &[String]) -> Option<Vec<String>> {
    (!list.is_empty()).then(|| list.to_vec())
}

/// The timeout in seconds, rounded up, so that an admitted call may finish.
fn whole_seconds(timeout: Duration) -> i64 {
    let seconds = timeout.as_secs() + u64::from(timeout.subsec_nanos() > 0);
    i64::try_from(seconds.max(1)).unwrap_or(i64::MAX)
}

/// The kubelet's waiting reason for a component that cannot run, so that more pods would not help.
const REASON_INVALID: &str = "CreateContainerError";

/// Whether a revision can answer. `present` is whether the artifact store has its component or, for an image, whether
/// nodes run containers; `missing_files` the archive of its files if the store lacks it; `environment` whether its
/// environment can be made.
pub(super) fn readiness(
    revision: &Revision,
    present: bool,
    missing_files: Option<Digest>,
    environment: Result<(), EnvError>,
    pods: &[Arc<Pod>],
) -> Readiness {
    let source = &revision.spec.source;
    if source.image.is_some() {
        if !present {
            return Readiness::RuntimeMissing { source: "image" };
        }
        // The pods pull and start the image when a request comes; the request gets their error.
        return environment.map_or_else(
            |error| Readiness::EnvironmentMissing { message: error.to_string() },
            |()| Readiness::Ready,
        );
    }
    let Some(component) = source.component else {
        return Readiness::RuntimeMissing { source: "oci" };
    };
    if !present {
        return Readiness::ComponentMissing { digest: component.to_string() };
    }
    if let Some(digest) = missing_files {
        return Readiness::ComponentMissing { digest: digest.to_string() };
    }
    // Applies even while its pods run: they have the environment of their start, but new requests are refused.
    if let Err(error) = environment {
        return Readiness::EnvironmentMissing { message: error.to_string() };
    }
    if pods.iter().any(|pod| crate::pods::is_ready(pod)) {
        return Readiness::Ready;
    }
    if let Some(message) = pods.iter().find_map(|pod| refusal(pod)) {
        return Readiness::ComponentInvalid { message };
    }
    match revision.status.as_ref().and_then(|status| status.component.as_ref()) {
        None => Readiness::Compiling { message: None },
        Some(ComponentStatus { state: ComponentState::Compiling, message }) => {
            Readiness::Compiling { message: message.clone() }
        }
        Some(ComponentStatus { state: ComponentState::Compiled, .. }) => Readiness::Ready,
        Some(ComponentStatus { state: ComponentState::Refused, message }) => {
            Readiness::ComponentInvalid { message: message.clone().unwrap_or_default() }
        }
    }
}

fn refusal(pod: &Pod) -> Option<String> {
    let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
    statuses.iter().find_map(|status| {
        let waiting = status.state.as_ref()?.waiting.as_ref()?;
        let reason = waiting.reason.as_deref()?;
        (reason == REASON_INVALID).then(|| waiting.message.clone().unwrap_or_default())
    })
}

/// Whether the revision has no owner and was made for this function.
pub(super) fn is_orphan_of(revision: &Revision, function: &str) -> bool {
    controller_of(revision).is_none()
        && revision.metadata.deletion_timestamp.is_none()
        && revision.spec.function == function
}

/// The hosts that the tags of a function's traffic ask for: the tag, and the host's first label.
pub(super) fn tag_hosts(function: &Function) -> impl Iterator<Item = (&str, String)> {
    let name = function.metadata.name.as_deref().unwrap_or_default();
    let tags = function.spec.traffic.iter().filter_map(|target| target.tag.as_deref());
    tags.map(move |tag| (tag, format!("{tag}-{name}")))
}

/// The other holder of the host that a tag claims. A function of that name takes precedence over tags; among tags,
/// that of the first function does (the gateway's rule).
pub(super) fn host_holder(
    function: &Function,
    tag: &str,
    label: &str,
    same_name: bool,
    claimants: &[Arc<Function>],
) -> Option<String> {
    if same_name {
        return Some(format!("function {label}"));
    }
    let claims = claimants.iter().flat_map(|other| {
        let name = other.metadata.name.as_deref().unwrap_or_default();
        tag_hosts(other).filter(|(_, host)| host == label).map(move |(tag, _)| (name, tag))
    });
    let (name, first) = claims.min()?;
    let own = function.metadata.name.as_deref() == Some(name) && first == tag;
    (!own).then(|| format!("tag {first} of function {name}"))
}

/// Whether the revision belongs to this function, and not to an earlier function of the same name.
pub(super) fn owned_by(revision: &Revision, function: &Function) -> bool {
    controller_of(revision).is_some_and(|owner| owner.uid == uid(function))
}
