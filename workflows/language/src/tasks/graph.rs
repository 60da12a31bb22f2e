//! The order of tasks: which of them run in sequence, and which in parallel.
//!
//! States can only be composed in sequence and in parallel, so a graph is decomposed by two rules, applied in turn to
//! smaller and smaller sets of tasks ("before" is the transitive closure of the dependencies):
//!
//! - *Parallel*: sets of tasks of which none is before one of another set. They are the connected components of the
//!   graph of comparable pairs.
//! - *Series*: sets of tasks of which each task is before every task of the next set. They are the connected components
//!   of the graph of incomparable pairs.
//!
//! A graph that both rules decompose completely is series-parallel (it has no "N": a before c, b before c, b before d,
//! and no other pair), and waits for nothing but dependencies. Source: Valdes, Tarjan, Lawler, "The recognition of
//! series parallel digraphs", 1982.
//!
//! *Otherwise* the tasks without predecessors in the set run first, in parallel, and then the rest, which is decomposed
//! by the same rules. The rest may then wait for tasks that it does not depend on. Sets whose nesting would be too deep
//! run level by level.

use petgraph::algo::{tarjan_scc, toposort, tred};
use petgraph::graph::{DiGraph, NodeIndex};
use petgraph::unionfind::UnionFind;
use petgraph::visit::IntoNeighbors as _;

use super::document::GraphTask;
use crate::error::Problem;

/// The maximum nesting of Parallel states. The language allows [`crate::parse::FLOW_DEPTH_MAX`]; the rest is reserved
/// for flows within the states of tasks.
pub(super) const NESTING_MAX: usize = 30;

/// The arrangement of a set of tasks, which are identified by their indexes in the document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Arrangement {
    Task(usize),
    /// Two or more, in sequence.
    Series(Vec<Arrangement>),
    /// Two or more, in parallel.
    Parallel(Vec<Arrangement>),
}

impl Arrangement {
    /// Adds the indexes of all tasks to `found`.
    pub(super) fn collect(&self, found: &mut Vec<usize>) {
        match self {
            Self::Task(at) => found.push(*at),
            Self::Series(parts) | Self::Parallel(parts) => parts.iter().for_each(|part| part.collect(found)),
        }
    }
}

/// Arranges one or more tasks. Dependencies are indexes of other tasks.
///
/// # Errors
/// The tasks have a cycle; the problem contains its path.
pub(super) fn arrange(tasks: &[GraphTask]) -> Result<Arrangement, Vec<Problem>> {
    let graph = graph_of(tasks);
    let Ok(sorted) = toposort(&graph, None) else { return Err(cycles(tasks, &graph)) };
    let order = Order::new(&graph, &sorted);
    let all: Vec<usize> = (0..tasks.len()).collect();
    Ok(order.arrangement(&all, 0))
}

/// The dependency graph, with edges from a dependency to its dependents.
fn graph_of(tasks: &[GraphTask]) -> DiGraph<(), ()> {
    let mut graph = DiGraph::with_capacity(tasks.len(), tasks.len());
    for _ in tasks {
        graph.add_node(());
    }
    for (at, task) in tasks.iter().enumerate() {
        for dependency in &task.dependencies {
            graph.add_edge(NodeIndex::new(*dependency), NodeIndex::new(at), ());
        }
    }
    graph
}

/// One problem for each set of tasks that depend on each other (a strongly connected component).
fn cycles(tasks: &[GraphTask], graph: &DiGraph<(), ()>) -> Vec<Problem> {
    let sets = tarjan_scc(graph).into_iter().filter(|set| set.len() > 1);
    let mut problems: Vec<_> = sets.map(|set| cycle(tasks, &set)).collect();
    problems.sort_by(|one, other| one.location.cmp(&other.location));
    problems
}

/// The shortest cycle through the set's first task, a strongly connected component.
fn cycle(tasks: &[GraphTask], set: &[NodeIndex]) -> Problem {
    let within = |at: &usize| set.contains(&NodeIndex::new(*at));
    let first = set.iter().map(|node| node.index()).min().unwrap_or_default();
    // Breadth-first search from the first task along its dependencies, until a task depends on it.
    let mut came_from = vec![None; tasks.len()];
    let mut queue = std::collections::VecDeque::from([first]);
    let mut path = Vec::new();
    while let Some(at) = queue.pop_front() {
        if tasks[at].dependencies.contains(&first) {
            let mut next = Some(at);
            while let Some(at) = next {
                path.push(at);
                next = came_from[at];
            }
            break;
        }
        for dependency in tasks[at].dependencies.iter().copied().filter(within) {
            if dependency != first && came_from[dependency].is_none() {
                came_from[dependency] = Some(at);
                queue.push_back(dependency);
            }
        }
    }
    // Each task depends on the following one.
    path.reverse();
    let mut names: Vec<&str> = path.iter().map(|at| &*tasks[*at].name).collect();
    names.push(&tasks[first].name);
    let message = format!("the dependencies form a cycle: {}", names.join(" → "));
    Problem::at(format!("/tasks/{}/dependencies", tasks[first].name), message)
}

/// The transitive closure of the dependencies.
struct Order {
    /// `before[a][b]`: a is before b.
    before: Vec<Vec<bool>>,
}

impl Order {
    fn new(graph: &DiGraph<(), ()>, sorted: &[NodeIndex]) -> Self {
        let (list, rank) = tred::dag_to_toposorted_adjacency_list::<_, u32>(graph, sorted);
        let (_, closure) = tred::dag_transitive_reduction_closure(&list);
        let of_rank: Vec<usize> = sorted.iter().map(|node| node.index()).collect();
        let mut before = vec![vec![false; sorted.len()]; sorted.len()];
        for (from, reached) in before.iter_mut().enumerate() {
            for to in closure.neighbors(rank[from]) {
                reached[of_rank[to as usize]] = true;
            }
        }
        Self { before }
    }

    fn comparable(&self, a: usize, b: usize) -> bool {
        self.before[a][b] || self.before[b][a]
    }

    /// `nesting` is the number of Parallel states around the set.
    fn arrangement(&self, set: &[usize], nesting: usize) -> Arrangement {
        let mut series = Vec::new();
        let mut set = set.to_vec();
        loop {
            if let [only] = set[..] {
                series.push(Arrangement::Task(only));
                break;
            }
            if nesting == NESTING_MAX {
                self.by_levels(set, &mut series);
                break;
            }
            let independent = components(&set, |a, b| self.comparable(a, b));
            if independent.len() > 1 {
                let branches = independent.iter().map(|part| self.arrangement(part, nesting + 1));
                series.push(Arrangement::Parallel(branches.collect()));
                break;
            }
            let mut consecutive = components(&set, |a, b| !self.comparable(a, b));
            if consecutive.len() > 1 {
                // A task of a later set has all tasks of the earlier sets as predecessors, and so has more of them.
                consecutive.sort_by_cached_key(|part| {
                    set.iter().filter(|other| self.before[**other][part[0]]).count()
                });
                for part in &consecutive {
                    match self.arrangement(part, nesting) {
                        Arrangement::Series(parts) => series.extend(parts),
                        part => series.push(part),
                    }
                }
                break;
            }
            let rest = self.without_first(&mut set);
            series.push(side_by_side(set));
            set = rest;
        }
        match series.len() {
            1 => series.remove(0),
            _ => Arrangement::Series(series),
        }
    }

    /// Keeps the tasks without predecessors in the set, and returns the others.
    fn without_first(&self, set: &mut Vec<usize>) -> Vec<usize> {
        let (first, rest) = set.iter().partition(|at| !set.iter().any(|other| self.before[*other][**at]));
        *set = first;
        rest
    }

    fn by_levels(&self, mut set: Vec<usize>, series: &mut Vec<Arrangement>) {
        while !set.is_empty() {
            let rest = self.without_first(&mut set);
            series.push(side_by_side(set));
            set = rest;
        }
    }
}

fn side_by_side(set: Vec<usize>) -> Arrangement {
    match set[..] {
        [only] => Arrangement::Task(only),
        _ => Arrangement::Parallel(set.into_iter().map(Arrangement::Task).collect()),
    }
}

/// The connected components of a set, ordered by their first members; each in the order of the set.
fn components(set: &[usize], connected: impl Fn(usize, usize) -> bool) -> Vec<Vec<usize>> {
    let mut sets = UnionFind::<usize>::new(set.len());
    for (at, a) in set.iter().enumerate() {
        for (offset, b) in set[at + 1..].iter().enumerate() {
            if connected(*a, *b) {
                sets.union(at, at + 1 + offset);
            }
        }
    }
    let mut found: Vec<Vec<usize>> = Vec::new();
    let mut number_of = std::collections::HashMap::new();
    for (at, task) in set.iter().enumerate() {
        let number = *number_of.entry(sets.find(at)).or_insert_with(|| {
            found.push(Vec::new());
            found.len() - 1
        });
        found[number].push(*task);
    }
    found
}
