//! Whether a node may run a pod, regardless of what else runs there: its labels, taints and runtimes against the
//! pod's selector, affinity, tolerations and runtime class. Shared by the scheduler and the DaemonSet controller.

use std::collections::BTreeMap;

use crate::{
    k8s::api::core::v1::{
        Node, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, PodSpec, PreferredSchedulingTerm,
        Taint, Toleration,
    },
    wellknown::{LABEL_RUNTIME_PREFIX, RUNTIME_CLASS_WASM, RUNTIME_OCI},
};

/// The facts about a node that change only with the Node object.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeFacts {
    pub name: String,
    pub labels: BTreeMap<String, String>,
    pub taints: Vec<Taint>,
    pub unschedulable: bool,
}

/// The part of a pod's requirements and preferences that depends only on a node's facts (labels, taints, runtimes),
/// and not on what runs there. Equal constraints are evaluated once per node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Constraints {
    pub runtime_class: Option<String>,
    pub node_selector: Vec<(String, String)>,
    pub required: Option<NodeSelector>,
    pub preferred: Vec<PreferredSchedulingTerm>,
    pub tolerations: Vec<Toleration>,
}

impl Constraints {
    pub fn of(spec: &PodSpec) -> Self {
        let affinity = spec.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
        Self {
            runtime_class: spec.runtime_class_name.clone().filter(|class| !class.is_empty()),
            node_selector: spec.node_selector.clone().unwrap_or_default().into_iter().collect(),
            required: affinity
                .and_then(|affinity| affinity.required_during_scheduling_ignored_during_execution.clone()),
            preferred: affinity
                .and_then(|affinity| affinity.preferred_during_scheduling_ignored_during_execution.clone())
                .unwrap_or_default(),
            tolerations: spec.tolerations.clone().unwrap_or_default(),
        }
    }
}

/// The reason why a node cannot take a pod, independent of other pods. The words are upstream's where upstream has
/// the rule.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Misfit {
    Unschedulable,
    Selector,
    Taint {
        key: String,
        value: String,
    },
    Runtime {
        class: String,
    },
    /// The pod has no runtime class, and the node runs components only.
    Oci,
}

impl std::fmt::Display for Misfit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unschedulable => f.write_str("node(s) were unschedulable"),
            Self::Selector => f.write_str("node(s) didn't match Pod's node affinity/selector"),
            Self::Taint { key, value } => write!(f, "node(s) had untolerated taint {{{key}: {value}}}"),
            Self::Runtime { class } => write!(f, "node(s) had no runtime of class {class:?}"),
            Self::Oci => {
                f.write_str("node(s) run no OCI containers (components have spec.runtimeClassName: wasm)")
            }
        }
    }
}

/// A verdict that holds until the node's facts change.
#[derive(Clone, Debug, PartialEq)]
pub struct FitVerdict {
    pub misfit: Option<Misfit>,
    /// PreferNoSchedule taints that the pod does not tolerate.
    pub taints_disliked: u32,
    /// Sum of the weights of the preferred terms that match.
    pub preference: u32,
    /// The node selector and the required node affinity match, regardless of other reasons against the node.
    pub is_selected: bool,
    /// Every taint with the effect NoSchedule or NoExecute is tolerated.
    pub is_tolerated: bool,
}

const UNSCHEDULABLE_TAINT: &str = "node.kubernetes.io/unschedulable";

impl NodeFacts {
    pub fn of(node: &Node) -> Self {
        let spec = node.spec.as_ref();
        Self {
            name: node.metadata.name.clone().unwrap_or_default(),
            labels: node.metadata.labels.clone().unwrap_or_default(),
            taints: spec.and_then(|spec| spec.taints.clone()).unwrap_or_default(),
            unschedulable: spec.and_then(|spec| spec.unschedulable).unwrap_or(false),
        }
    }

    pub fn judge(&self, wanted: &Constraints) -> FitVerdict {
        let disliked = |taint: &&Taint| taint.effect == "PreferNoSchedule" && !tolerated(taint, wanted);
        let preferred = wanted.preferred.iter().filter(|term| self.matches_term(&term.preference));
        FitVerdict {
            misfit: self.misfit(wanted),
            taints_disliked: u32::try_from(self.taints.iter().filter(disliked).count()).unwrap_or(u32::MAX),
            preference: preferred.map(|term| u32::try_from(term.weight).unwrap_or(0)).sum(),
            is_selected: self.is_selected(wanted),
            is_tolerated: self.untolerated(wanted).is_none(),
        }
    }

    /// Whether one of the selector's terms matches; the node affinity of a volume is such a selector.
    pub fn matches_selector(&self, selector: &NodeSelector) -> bool {
        selector.node_selector_terms.iter().any(|term| self.matches_term(term))
    }

    fn misfit(&self, wanted: &Constraints) -> Option<Misfit> {
        if self.unschedulable {
            let taint =
                Taint { key: UNSCHEDULABLE_TAINT.into(), effect: "NoSchedule".into(), ..Taint::default() };
            if !tolerated(&taint, wanted) {
                return Some(Misfit::Unschedulable);
            }
        }
        match &wanted.runtime_class {
            Some(class) if !self.may_run(class) => return Some(Misfit::Runtime { class: class.clone() }),
            None if !self.runs_containers() => return Some(Misfit::Oci),
            _ => {}
        }
        if let Some(taint) = self.untolerated(wanted) {
            let (key, value) = (taint.key.clone(), taint.value.clone().unwrap_or_default());
            return Some(Misfit::Taint { key, value });
        }
        (!self.is_selected(wanted)).then_some(Misfit::Selector)
    }

    /// The first taint that excludes the pod.
    fn untolerated(&self, wanted: &Constraints) -> Option<&Taint> {
        let hard = |taint: &&Taint| matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute");
        self.taints.iter().filter(hard).find(|taint| !tolerated(taint, wanted))
    }

    fn is_selected(&self, wanted: &Constraints) -> bool {
        wanted.node_selector.iter().all(|(key, value)| self.labels.get(key) == Some(value))
            && wanted.required.as_ref().is_none_or(|selector| self.matches_selector(selector))
    }

    fn has_runtime(&self, class: &str) -> bool {
        self.labels.contains_key(&format!("{LABEL_RUNTIME_PREFIX}{class}"))
    }

    /// Whether pods of this class may run here. A class without a runtime of its own name is one of containers, whose
    /// RuntimeClass names the handler: only the node itself knows whether it has that (as upstream).
    fn may_run(&self, class: &str) -> bool {
        self.has_runtime(class) || class != RUNTIME_CLASS_WASM && self.runs_containers()
    }

    /// A node without runtime labels is not one of Mayfly's: upstream's nodes run containers.
    fn runs_containers(&self) -> bool {
        self.has_runtime(RUNTIME_OCI) || !self.labels.keys().any(|key| key.starts_with(LABEL_RUNTIME_PREFIX))
    }

    /// A term without requirements matches nothing, as upstream.
    fn matches_term(&self, term: &NodeSelectorTerm) -> bool {
        let expressions = term.match_expressions.iter().flatten();
        let fields = term.match_fields.iter().flatten();
        if expressions.clone().next().is_none() && fields.clone().next().is_none() {
            return false;
        }
        let labels = expressions
            .into_iter()
            .all(|expression| holds(expression, self.labels.get(&expression.key).map(String::as_str)));
        labels
            && fields
                .into_iter()
                .all(|field| field.key == "metadata.name" && holds(field, Some(self.name.as_str())))
    }
}

fn holds(requirement: &NodeSelectorRequirement, value: Option<&str>) -> bool {
    let values = requirement.values.as_deref().unwrap_or_default();
    let number = |text: Option<&str>| text.and_then(|text| text.parse::<i64>().ok());
    match requirement.operator.as_str() {
        "In" => value.is_some_and(|value| values.iter().any(|known| known == value)),
        "NotIn" => value.is_none_or(|value| values.iter().all(|known| known != value)),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => number(value).zip(number(values.first().map(String::as_str))).is_some_and(|(a, b)| a > b),
        "Lt" => number(value).zip(number(values.first().map(String::as_str))).is_some_and(|(a, b)| a < b),
        _ => false,
    }
}

fn tolerated(taint: &Taint, wanted: &Constraints) -> bool {
    wanted.tolerations.iter().any(|toleration| tolerates(toleration, taint))
}

/// Whether a toleration is of this taint (upstream: `Toleration.ToleratesTaint`).
pub fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let effect = toleration.effect.as_deref().unwrap_or_default();
    let key = toleration.key.as_deref().unwrap_or_default();
    if (!effect.is_empty() && effect != taint.effect) || (!key.is_empty() && key != taint.key) {
        return false;
    }
    match toleration.operator.as_deref() {
        Some("Exists") => true,
        Some("Equal" | "") | None => {
            !key.is_empty()
                && toleration.value.as_deref().unwrap_or_default()
                    == taint.value.as_deref().unwrap_or_default()
        }
        _ => false,
    }
}
