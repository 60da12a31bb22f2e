//! Work that waits for a worker, by activity. A plain struct.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// One piece of work.
#[derive(Debug, Clone)]
pub(crate) struct Work {
    pub(crate) execution: u64,
    pub(crate) effect: u32,
    pub(crate) token: Arc<str>,
    pub(crate) input: Arc<str>,
}

/// The lines of all activities.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    lines: HashMap<String, Line>,
}

#[derive(Debug, Default)]
struct Line {
    work: VecDeque<Work>,
    workers: VecDeque<tokio::sync::oneshot::Sender<Work>>,
}

impl Lines {
    /// Hands work to the worker that has waited longest, or lets it wait.
    pub(crate) fn offer(&mut self, activity: &str, mut work: Work) {
        let line = self.lines.entry(activity.to_owned()).or_default();
        while let Some(worker) = line.workers.pop_front() {
            match worker.send(work) {
                Ok(()) => return,
                Err(back) => work = back,
            }
        }
        line.work.push_back(work);
    }

    /// The work that has waited longest, or a place in the workers' line.
    pub(crate) fn ask(&mut self, activity: &str) -> Result<Work, tokio::sync::oneshot::Receiver<Work>> {
        let line = self.lines.entry(activity.to_owned()).or_default();
        if let Some(work) = line.work.pop_front() {
            return Ok(work);
        }
        line.workers.retain(|worker| !worker.is_closed());
        let (sender, receiver) = tokio::sync::oneshot::channel();
        line.workers.push_back(sender);
        Err(receiver)
    }

    /// Takes back work that nobody waits for any more.
    pub(crate) fn withdraw(&mut self, execution: u64, effect: u32) {
        for line in self.lines.values_mut() {
            line.work.retain(|work| (work.execution, work.effect) != (execution, effect));
        }
        self.lines.retain(|_, line| !line.work.is_empty() || !line.workers.is_empty());
    }
}
