//! The rules of one pod about other pods, evaluated over all nodes: which nodes they exclude, and a score.
//!
//! Pure: snapshot and index in, a verdict by node out. Sources: upstream's plugins `interpodaffinity` and
//! `podtopologyspread`. Scores are normalised over the nodes that neither the pod's node constraints nor these rules
//! exclude; upstream leaves out nodes without room as well.

use std::{fmt, sync::Arc};

use crate::{
    cache::NodeId,
    pod_constraints::{AffinityTerm, PodFilter, RequiredAffinity, SpreadConstraint},
    pod_index::{NodeCounts, PodIndex, TermRole},
    request::PodRequest,
    snapshot::{DomainColumn, Snapshot, Verdicts},
};

/// Weights of both plugins (upstream's default), on the scale on which the maximum score is 100.
const AFFINITY_WEIGHT: f32 = 2.0;
const SPREAD_WEIGHT: f32 = 2.0;
/// The weight of a bound pod's required affinity for a pod that matches it (upstream: `HardPodAffinityWeight`).
const REQUIRED_AFFINITY_WEIGHT: i64 = 1;

/// The reason why pods exclude a node. The words are upstream's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TopologyMisfit {
    SpreadLabel,
    Spread,
    Affinity,
    AntiAffinity,
    ExistingAntiAffinity,
}

impl fmt::Display for TopologyMisfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SpreadLabel => {
                "node(s) didn't match pod topology spread constraints (missing required label)"
            }
            Self::Spread => "node(s) didn't match pod topology spread constraints",
            Self::Affinity => "node(s) didn't match pod affinity rules",
            Self::AntiAffinity => "node(s) didn't match pod anti-affinity rules",
            Self::ExistingAntiAffinity => "node(s) didn't satisfy existing pods anti-affinity rules",
        })
    }
}

/// The verdicts by node; empty where no rule concerns the pod.
#[derive(Debug, Default)]
pub(crate) struct TopologyRules {
    misfits: Vec<Option<TopologyMisfit>>,
    scores: Vec<f32>,
}

impl TopologyRules {
    pub(crate) fn of(
        snapshot: &mut Snapshot,
        verdicts: &Verdicts,
        index: &mut PodIndex,
        request: &PodRequest,
    ) -> Self {
        let mut evaluation = Evaluation { snapshot, verdicts, index, request, misfits: Vec::new() };
        evaluation.spread();
        evaluation.affinity();
        evaluation.anti_affinity();
        evaluation.existing_anti_affinity();
        let scores = evaluation.scores();
        Self { misfits: evaluation.misfits, scores }
    }

    pub(crate) fn misfit(&self, id: NodeId) -> Option<TopologyMisfit> {
        self.misfits.get(id).copied().flatten()
    }

    pub(crate) fn score(&self, id: NodeId) -> f32 {
        self.scores.get(id).copied().unwrap_or(0.0)
    }
}

struct Evaluation<'a> {
    snapshot: &'a mut Snapshot,
    verdicts: &'a Verdicts,
    index: &'a mut PodIndex,
    request: &'a PodRequest,
    misfits: Vec<Option<TopologyMisfit>>,
}

impl Evaluation<'_> {
    fn places(&self) -> usize {
        self.snapshot.facts.len()
    }

    fn exclude(&mut self, misfit: TopologyMisfit, is_excluded: impl Fn(NodeId) -> bool) {
        let places = self.places();
        self.misfits.resize(places, None);
        for (id, known) in self.misfits.iter_mut().enumerate() {
            if known.is_none() && is_excluded(id) {
                *known = Some(misfit);
            }
        }
    }

    fn matches_itself(&self, filter: &PodFilter) -> bool {
        filter.matches(&self.request.traits, self.index.namespaces())
    }

    /// Whether a constraint counts the node's pods, and its domain as one that could have some.
    fn is_counted(&self, id: NodeId, constraint: &SpreadConstraint) -> bool {
        self.snapshot.facts[id].is_some() && {
            let verdict = self.verdicts.of(id);
            (!constraint.honors_affinity || verdict.is_selected)
                && (!constraint.honors_taints || verdict.is_tolerated)
        }
    }

    fn spread(&mut self) {
        let request = self.request;
        let required: Vec<_> =
            request.others.spread.iter().filter(|constraint| constraint.is_required).collect();
        if required.is_empty() {
            return;
        }
        let columns: Vec<_> =
            required.iter().map(|constraint| self.snapshot.domains(&constraint.topology_key)).collect();
        let has_all = |id: NodeId| columns.iter().all(|column| column.of_node[id] != 0);
        for (constraint, column) in required.iter().zip(&columns) {
            let counts = self.index.counts(&constraint.pods, false);
            let mut by_domain: Vec<Option<u32>> = vec![None; column.domains()];
            for id in (0..self.places()).filter(|id| has_all(*id) && self.is_counted(*id, constraint)) {
                let count = by_domain[column.of_node[id] as usize].get_or_insert(0);
                *count += counts.get(&id).copied().unwrap_or(0);
            }
            let domains = by_domain.iter().flatten().count();
            let least = by_domain.iter().flatten().min().copied().unwrap_or(0);
            let least = if domains < constraint.min_domains { 0 } else { least };
            let own = u32::from(self.matches_itself(&constraint.pods));
            self.exclude(TopologyMisfit::SpreadLabel, |id| column.of_node[id] == 0);
            self.exclude(TopologyMisfit::Spread, |id| {
                let count = by_domain[column.of_node[id] as usize].unwrap_or(0);
                (count + own).saturating_sub(least) > constraint.max_skew
            });
        }
    }

    fn affinity(&mut self) {
        let request = self.request;
        let Some(RequiredAffinity { pods, terms }) = &request.others.affinity else { return };
        let counts = self.index.counts(pods, true);
        let columns: Vec<_> = terms.iter().map(|term| self.snapshot.domains(&term.topology_key)).collect();
        let present: Vec<_> = columns.iter().map(|column| presence(&counts, column)).collect();
        // The first pod of a group that has affinity to itself may start anywhere.
        let starts = present.iter().all(|present| !present.contains(&true)) && self.matches_itself(pods);
        self.exclude(TopologyMisfit::Affinity, |id| {
            !columns.iter().zip(&present).all(|(column, present)| {
                let domain = column.of_node[id];
                domain != 0 && (starts || present[domain as usize])
            })
        });
    }

    fn anti_affinity(&mut self) {
        let request = self.request;
        for AffinityTerm { pods, topology_key } in &request.others.anti_affinity {
            let counts = self.index.counts(pods, true);
            let column = self.snapshot.domains(topology_key);
            let present = presence(&counts, &column);
            self.exclude(TopologyMisfit::AntiAffinity, |id| present[column.of_node[id] as usize]);
        }
    }

    fn existing_anti_affinity(&mut self) {
        let mut excluded = Vec::new();
        for (held, counts) in self.index.holders() {
            if held.role == TermRole::RequiredAntiAffinity && self.matches_itself(&held.term.pods) {
                excluded.push((held.term.topology_key.clone(), counts.clone()));
            }
        }
        for (key, counts) in excluded {
            let column = self.snapshot.domains(&key);
            let present = presence(&counts, &column);
            self.exclude(TopologyMisfit::ExistingAntiAffinity, |id| present[column.of_node[id] as usize]);
        }
    }

    /// The sum of both plugins' scores by node; empty when nothing is preferred.
    fn scores(&mut self) -> Vec<f32> {
        let mut total = Vec::new();
        for (raw, weight, prefers_low) in [
            (self.preferred_affinity(), AFFINITY_WEIGHT, false),
            (self.preferred_spread(), SPREAD_WEIGHT, true),
        ] {
            let Some(raw) = raw else { continue };
            let feasible = (0..self.places()).filter(|id| {
                self.snapshot.facts[*id].is_some()
                    && self.verdicts.of(*id).misfit.is_none()
                    && self.misfits.get(*id).copied().flatten().is_none()
            });
            let (mut least, mut most) = (f32::INFINITY, f32::NEG_INFINITY);
            for score in feasible.filter_map(|id| raw[id]) {
                least = least.min(score);
                most = most.max(score);
            }
            total.resize(self.places(), 0.0);
            for (id, score) in raw.iter().enumerate() {
                let Some(score) = score else { continue };
                let normal = match prefers_low {
                    true if most <= 0.0 => 1.0,
                    true => (most + least - score) / most,
                    false if most > least => (score - least) / (most - least),
                    false => 0.0,
                };
                total[id] += normal * 100.0 * weight;
            }
        }
        total
    }

    /// Preferred terms of the pod, and those of bound pods that match it.
    #[expect(clippy::cast_precision_loss, reason = "scores are compared, not counted")]
    fn preferred_affinity(&mut self) -> Option<Vec<Option<f32>>> {
        let request = self.request;
        let mut parts: Vec<(NodeCounts, Arc<DomainColumn>, i64)> = Vec::new();
        for (term, weight) in &request.others.preferred {
            let counts = self.index.counts(&term.pods, true);
            parts.push((counts, self.snapshot.domains(&term.topology_key), i64::from(*weight)));
        }
        let mut held_parts = Vec::new();
        for (held, counts) in self.index.holders() {
            let weight = match held.role {
                TermRole::RequiredAffinity => REQUIRED_AFFINITY_WEIGHT,
                TermRole::Preferred(weight) => i64::from(weight),
                TermRole::RequiredAntiAffinity => continue,
            };
            if self.matches_itself(&held.term.pods) {
                held_parts.push((counts.clone(), held.term.topology_key.clone(), weight));
            }
        }
        for (counts, key, weight) in held_parts {
            parts.push((counts, self.snapshot.domains(&key), weight));
        }
        if parts.is_empty() {
            return None;
        }
        let mut scores = vec![0i64; self.places()];
        for (counts, column, weight) in parts {
            let sums = sums(&counts, &column);
            for (id, score) in scores.iter_mut().enumerate() {
                *score += weight * i64::from(sums[column.of_node[id] as usize]);
            }
        }
        Some(scores.into_iter().map(|score| Some(score as f32)).collect())
    }

    /// Lower is better; a node without one of the labels has no score.
    #[expect(clippy::cast_precision_loss, reason = "scores are compared, not counted")]
    fn preferred_spread(&mut self) -> Option<Vec<Option<f32>>> {
        let request = self.request;
        let preferred: Vec<_> =
            request.others.spread.iter().filter(|constraint| !constraint.is_required).collect();
        let mut scores: Option<Vec<Option<f32>>> = None;
        for constraint in preferred {
            let column = self.snapshot.domains(&constraint.topology_key);
            let is_default = matches!(&*constraint.pods, PodFilter::Owner(_));
            if column.domains() <= 1 && is_default {
                continue; // No node has the label.
            }
            let counts = self.index.counts(&constraint.pods, false);
            let counted = counts.into_iter().filter(|(id, _)| self.is_counted(*id, constraint));
            let sums = sums(&counted.collect(), &column);
            let weight = ((column.domains() + 1) as f32).ln();
            let places = self.places();
            for (id, score) in scores.get_or_insert_with(|| vec![Some(0.0); places]).iter_mut().enumerate() {
                let domain = column.of_node[id];
                *score = score.filter(|_| domain != 0 || is_default).map(|score| {
                    score + sums[domain as usize] as f32 * weight + (constraint.max_skew - 1) as f32
                });
            }
        }
        scores
    }
}

/// By domain: whether one of its nodes has a counted pod. Nodes without the label have the domain 0, which never has
/// one.
fn presence(counts: &NodeCounts, column: &DomainColumn) -> Vec<bool> {
    sums(counts, column).into_iter().map(|sum| sum > 0).collect()
}

/// By domain: the sum over its nodes.
fn sums(counts: &NodeCounts, column: &DomainColumn) -> Vec<u32> {
    let mut sums = vec![0; column.domains()];
    for (id, count) in counts {
        if let Some(domain) = column.of_node.get(*id).filter(|domain| **domain != 0) {
            sums[*domain as usize] += count;
        }
    }
    sums
}
