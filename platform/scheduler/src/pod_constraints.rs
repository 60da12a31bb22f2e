//! A pod's constraints on where other pods run: inter-pod affinity and anti-affinity, and topology spread.
//!
//! Read once from the pod's spec. A term that cannot be parsed matches no pod, as upstream (validation refuses it).

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use mayfly_api::{
    k8s::{
        api::core::v1::{Pod, PodAffinityTerm, PodSpec, TopologySpreadConstraint, WeightedPodAffinityTerm},
        apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement},
    },
    selector::Selector,
    wellknown::LABEL_HOSTNAME,
};

pub(crate) type Labels = BTreeMap<String, String>;

const LABEL_ZONE: &str = "topology.kubernetes.io/zone";
/// The skew from which pods of one owner are spread by preference (upstream's defaults of PodTopologySpread).
const HOST_SKEW_DEFAULT: u32 = 3;
const ZONE_SKEW_DEFAULT: u32 = 5;

/// The requirements and preferences of a pod about other pods. Empty for most pods.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct PodConstraints {
    /// One filter for all required affinity terms: upstream counts only pods that match every term.
    pub(crate) affinity: Option<RequiredAffinity>,
    pub(crate) anti_affinity: Vec<AffinityTerm>,
    /// Preferred terms with their weights; anti-affinity has a negative weight.
    pub(crate) preferred: Vec<(AffinityTerm, i32)>,
    pub(crate) spread: Vec<SpreadConstraint>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RequiredAffinity {
    /// Matches pods that match every term.
    pub(crate) pods: Arc<PodFilter>,
    pub(crate) terms: Vec<AffinityTerm>,
}

/// Pods, and the node label whose value makes nodes one domain.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct AffinityTerm {
    pub(crate) pods: Arc<PodFilter>,
    pub(crate) topology_key: String,
}

/// A topology spread constraint.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SpreadConstraint {
    pub(crate) pods: Arc<PodFilter>,
    pub(crate) topology_key: String,
    pub(crate) max_skew: u32,
    pub(crate) min_domains: usize,
    /// `DoNotSchedule`; otherwise a preference.
    pub(crate) is_required: bool,
    /// Whether nodes that the pod's node affinity excludes are left out of the count.
    pub(crate) honors_affinity: bool,
    /// Whether nodes whose taints the pod does not tolerate are left out of the count.
    pub(crate) honors_taints: bool,
}

/// A set of pods.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum PodFilter {
    /// The pods of one controller, by its uid.
    Owner(String),
    /// The pods that match every part.
    Parts(Vec<FilterPart>),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FilterPart {
    namespaces: BTreeSet<String>,
    /// Namespaces by their labels, in addition to those named.
    namespace_selector: Option<Selector>,
    /// `None`: no pod.
    selector: Option<Selector>,
}

/// The properties of a pod that filters read.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct PodTraits {
    pub(crate) namespace: String,
    pub(crate) labels: Labels,
    /// The uid of the pod's controller.
    pub(crate) owner: Option<String>,
}

impl PodTraits {
    pub(crate) fn of(pod: &Pod) -> Self {
        let owners = pod.metadata.owner_references.iter().flatten();
        Self {
            namespace: pod.metadata.namespace.clone().unwrap_or_default(),
            labels: pod.metadata.labels.clone().unwrap_or_default(),
            owner: owners
                .filter(|owner| owner.controller == Some(true))
                .map(|owner| owner.uid.clone())
                .next(),
        }
    }
}

/// The labels of namespaces, for terms with a `namespaceSelector`.
pub(crate) type NamespaceLabels = BTreeMap<String, Labels>;

impl PodFilter {
    /// Whether the pod belongs to the set.
    pub(crate) fn matches(&self, pod: &PodTraits, namespaces: &NamespaceLabels) -> bool {
        match self {
            Self::Owner(owner) => pod.owner.as_ref() == Some(owner),
            Self::Parts(parts) => parts.iter().all(|part| part.matches(pod, namespaces)),
        }
    }

    /// Whether the labels of namespaces decide which pods belong to the set.
    pub(crate) fn reads_namespaces(&self) -> bool {
        matches!(self, Self::Parts(parts) if parts.iter().any(|part| part.namespace_selector.is_some()))
    }
}

impl FilterPart {
    fn matches(&self, pod: &PodTraits, namespaces: &NamespaceLabels) -> bool {
        let no_labels = Labels::new();
        let in_namespace = self.namespaces.contains(&pod.namespace)
            || self.namespace_selector.as_ref().is_some_and(|selector| {
                selector.matches(namespaces.get(&pod.namespace).unwrap_or(&no_labels))
            });
        in_namespace && self.selector.as_ref().is_some_and(|selector| selector.matches(&pod.labels))
    }
}

impl PodConstraints {
    /// Whether a pod that is placed elsewhere can make this one fit.
    pub(crate) fn is_attracted(&self) -> bool {
        self.affinity.is_some() || self.spread.iter().any(|constraint| constraint.is_required)
    }

    pub(crate) fn of(spec: &PodSpec, traits: &PodTraits, prefers_spread: bool) -> Self {
        let affinity = spec.affinity.as_ref().and_then(|affinity| affinity.pod_affinity.as_ref());
        let anti = spec.affinity.as_ref().and_then(|affinity| affinity.pod_anti_affinity.as_ref());
        let terms = |terms: Option<&Vec<PodAffinityTerm>>| -> Vec<AffinityTerm> {
            terms.into_iter().flatten().map(|term| AffinityTerm::of(term, traits)).collect()
        };
        let required =
            terms(affinity.and_then(|a| a.required_during_scheduling_ignored_during_execution.as_ref()));
        let weighted = |terms: Option<&Vec<WeightedPodAffinityTerm>>, sign: i32| -> Vec<_> {
            let terms = terms.into_iter().flatten();
            terms
                .map(|term| (AffinityTerm::of(&term.pod_affinity_term, traits), sign * term.weight))
                .collect()
        };
        let mut preferred = weighted(
            affinity.and_then(|a| a.preferred_during_scheduling_ignored_during_execution.as_ref()),
            1,
        );
        preferred.extend(weighted(
            anti.and_then(|a| a.preferred_during_scheduling_ignored_during_execution.as_ref()),
            -1,
        ));
        let spread = spec.topology_spread_constraints.iter().flatten();
        let mut spread: Vec<_> = spread.map(|one| SpreadConstraint::of(one, traits)).collect();
        if let Some(owner) = &traits.owner
            && spread.is_empty()
            && prefers_spread
        {
            spread = SpreadConstraint::defaults(owner);
        }
        Self {
            affinity: RequiredAffinity::of(required),
            anti_affinity: terms(
                anti.and_then(|a| a.required_during_scheduling_ignored_during_execution.as_ref()),
            ),
            preferred,
            spread,
        }
    }
}

impl RequiredAffinity {
    fn of(terms: Vec<AffinityTerm>) -> Option<Self> {
        let parts = terms.iter().flat_map(|term| match &*term.pods {
            PodFilter::Parts(parts) => parts.clone(),
            PodFilter::Owner(_) => Vec::new(),
        });
        let pods = Arc::new(PodFilter::Parts(parts.collect()));
        (!terms.is_empty()).then_some(Self { pods, terms })
    }
}

impl AffinityTerm {
    fn of(term: &PodAffinityTerm, pod: &PodTraits) -> Self {
        let mut namespaces: BTreeSet<String> = term.namespaces.iter().flatten().cloned().collect();
        if namespaces.is_empty() && term.namespace_selector.is_none() {
            namespaces.insert(pod.namespace.clone());
        }
        let selector = term.label_selector.as_ref().map(|selector| {
            let same = requirements(term.match_label_keys.as_ref(), "In", &pod.labels);
            let other = requirements(term.mismatch_label_keys.as_ref(), "NotIn", &pod.labels);
            extended(selector, same.into_iter().chain(other))
        });
        let part = FilterPart {
            namespaces,
            namespace_selector: term
                .namespace_selector
                .as_ref()
                .and_then(|selector| Selector::from_object(selector).ok()),
            selector: selector.and_then(|selector| Selector::from_object(&selector).ok()),
        };
        Self { pods: Arc::new(PodFilter::Parts(vec![part])), topology_key: term.topology_key.clone() }
    }
}

impl SpreadConstraint {
    fn of(constraint: &TopologySpreadConstraint, pod: &PodTraits) -> Self {
        let same = requirements(constraint.match_label_keys.as_ref(), "In", &pod.labels);
        let selector = constraint.label_selector.as_ref().map(|selector| extended(selector, same));
        let part = FilterPart {
            namespaces: [pod.namespace.clone()].into(),
            namespace_selector: None,
            selector: selector.and_then(|selector| Selector::from_object(&selector).ok()),
        };
        let honors = |policy: &Option<String>, default: bool| {
            policy.as_deref().map_or(default, |policy| policy == "Honor")
        };
        Self {
            pods: Arc::new(PodFilter::Parts(vec![part])),
            topology_key: constraint.topology_key.clone(),
            max_skew: u32::try_from(constraint.max_skew).unwrap_or(1).max(1),
            min_domains: constraint
                .min_domains
                .and_then(|domains| usize::try_from(domains).ok())
                .unwrap_or(1),
            is_required: constraint.when_unsatisfiable == "DoNotSchedule",
            honors_affinity: honors(&constraint.node_affinity_policy, true),
            honors_taints: honors(&constraint.node_taints_policy, false),
        }
    }

    /// The preference for pods without constraints: the replicas of one owner on different nodes and zones.
    fn defaults(owner: &str) -> Vec<Self> {
        let pods = Arc::new(PodFilter::Owner(owner.to_owned()));
        [(LABEL_HOSTNAME, HOST_SKEW_DEFAULT), (LABEL_ZONE, ZONE_SKEW_DEFAULT)]
            .into_iter()
            .map(|(key, max_skew)| Self {
                pods: pods.clone(),
                topology_key: key.into(),
                max_skew,
                min_domains: 1,
                is_required: false,
                honors_affinity: true,
                honors_taints: false,
            })
            .collect()
    }
}

/// `matchLabelKeys` and `mismatchLabelKeys` as requirements with the pod's own values; keys that it lacks are ignored.
fn requirements(
    keys: Option<&Vec<String>>,
    operator: &str,
    labels: &Labels,
) -> Vec<LabelSelectorRequirement> {
    let keys = keys.into_iter().flatten();
    keys.filter_map(|key| {
        Some(LabelSelectorRequirement {
            key: key.clone(),
            operator: operator.into(),
            values: Some(vec![labels.get(key)?.clone()]),
        })
    })
    .collect()
}

fn extended(
    selector: &LabelSelector,
    more: impl IntoIterator<Item = LabelSelectorRequirement>,
) -> LabelSelector {
    let mut selector = selector.clone();
    selector.match_expressions.get_or_insert_default().extend(more);
    selector
}
