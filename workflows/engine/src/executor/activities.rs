//! Work that waits for a worker, by activity.

use mayfly_workflows_language::arn::ActivityArn;
use mayfly_workflows_machine::EffectId;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;

/// One piece of work.
pub(crate) struct Work {
    pub(crate) activity: ActivityArn,
    pub(crate) execution: u64,
    pub(crate) effect: EffectId,
    pub(crate) token: Arc<str>,
    pub(crate) input: Arc<str>,
}

/// Shows neither the token nor the input.
impl std::fmt::Debug for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Work")
            .field("activity", &self.activity)
            .field("execution", &self.execution)
            .field("effect", &self.effect)
            .finish_non_exhaustive()
    }
}

/// The lines of all activities.
#[derive(Debug, Default)]
pub(crate) struct ActivityQueues(Mutex<HashMap<ActivityArn, ActivityQueue>>);

#[derive(Debug, Default)]
struct ActivityQueue {
    work: VecDeque<Work>,
    workers: VecDeque<oneshot::Sender<ActivityHandover>>,
}

/// The end of the queue at which work is added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Front,
    Back,
}

/// A task on its way to a worker. If it is dropped on the way, because the worker disconnected, it returns to the
/// front of its queue.
#[derive(Debug)]
pub(crate) struct ActivityHandover {
    work: Option<Work>,
    lines: Arc<ActivityQueues>,
}

impl ActivityHandover {
    /// The work; `None` once it was taken.
    pub(crate) fn work(&self) -> Option<&Work> {
        self.work.as_ref()
    }

    /// The worker has it, or the state that wanted it has ended.
    pub(crate) fn take(mut self) -> Option<Work> {
        self.work.take()
    }
}

impl Drop for ActivityHandover {
    fn drop(&mut self) {
        if let Some(work) = self.work.take() {
            self.lines.join(work, End::Front);
        }
    }
}

impl ActivityQueues {
    /// Hands work to the worker that has waited longest, or lets it wait.
    pub(crate) fn offer(self: &Arc<Self>, work: Work) {
        self.join(work, End::Back);
    }

    fn join(self: &Arc<Self>, mut work: Work, end: End) {
        let mut lines = self.0.lock();
        let line = lines.entry(work.activity.clone()).or_default();
        while let Some(worker) = line.workers.pop_front() {
            match worker.send(ActivityHandover { work: Some(work), lines: self.clone() }) {
                Ok(()) => return,
                Err(mut back) => match back.work.take() {
                    Some(refused) => work = refused,
                    None => return,
                },
            }
        }
        match end {
            End::Front => line.work.push_front(work),
            End::Back => line.work.push_back(work),
        }
    }

    /// The work that has waited longest, or a place in the workers' line.
    pub(crate) fn request(
        self: &Arc<Self>,
        activity: &ActivityArn,
    ) -> Result<ActivityHandover, oneshot::Receiver<ActivityHandover>> {
        let mut lines = self.0.lock();
        let line = lines.entry(activity.clone()).or_default();
        if let Some(work) = line.work.pop_front() {
            return Ok(ActivityHandover { work: Some(work), lines: self.clone() });
        }
        line.workers.retain(|worker| !worker.is_closed());
        let (sender, receiver) = oneshot::channel();
        line.workers.push_back(sender);
        Err(receiver)
    }

    /// Removes work that no state waits for any more.
    pub(crate) fn withdraw(&self, execution: u64, effect: EffectId) {
        let mut lines = self.0.lock();
        for line in lines.values_mut() {
            line.work.retain(|work| (work.execution, work.effect) != (execution, effect));
        }
        lines.retain(|_, line| !line.work.is_empty() || !line.workers.is_empty());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn activity() -> ActivityArn {
        ActivityArn::from_trusted("arn:aws:states:us-east-1:000000000000:activity:a")
    }

    fn work(effect: u32) -> Work {
        Work {
            activity: activity(),
            execution: 1,
            effect: EffectId(effect),
            token: "t".into(),
            input: "{}".into(),
        }
    }

    fn effect_of(asked: Result<ActivityHandover, oneshot::Receiver<ActivityHandover>>) -> Option<EffectId> {
        asked.ok()?.take().map(|work| work.effect)
    }

    #[test]
    fn work_goes_to_who_waited_longest_and_in_its_order() {
        let lines = Arc::new(ActivityQueues::default());
        let mut first = lines.request(&activity()).expect_err("no work yet");
        let mut second = lines.request(&activity()).expect_err("no work yet");
        lines.offer(work(1));
        lines.offer(work(2));
        lines.offer(work(3));
        let effect = |handed: ActivityHandover| handed.take().map(|work| work.effect);
        assert_eq!(first.try_recv().ok().and_then(effect), Some(EffectId(1)));
        assert_eq!(second.try_recv().ok().and_then(effect), Some(EffectId(2)));
        assert_eq!(effect_of(lines.request(&activity())), Some(EffectId(3)));
    }

    #[test]
    fn a_worker_that_hangs_up_leaves_its_work_to_the_next() {
        let lines = Arc::new(ActivityQueues::default());
        let gone = lines.request(&activity()).expect_err("no work yet");
        lines.offer(work(1));
        lines.offer(work(2));
        // It was sent to a worker that does not receive it.
        drop(gone);
        let handed = lines.request(&activity()).expect("the first is back in front");
        assert_eq!(handed.work().map(|work| work.effect), Some(EffectId(1)));
        drop(handed);
        assert_eq!(effect_of(lines.request(&activity())), Some(EffectId(1)));
        assert_eq!(effect_of(lines.request(&activity())), Some(EffectId(2)));
        assert!(lines.request(&activity()).is_err(), "what was taken does not come back");
    }
}
