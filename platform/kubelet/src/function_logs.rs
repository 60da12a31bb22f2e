//! The logs of functions' revisions on this node: read as one, and removed with their revision.
//!
//! A function that is deleted and created again uses the same revision numbers, and so the same names of logs: a reader
//! of the new function's log must not get lines of the old one.

use std::{io, path::PathBuf, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::{StreamExt as _, stream};
use mayfly_api::{ObjectKey, Revision};
use mayfly_informer::{Change, Index, Informer};
use mayfly_runtime::logs::{self, LogLayout, LogOptions, LogReader, LogStream, RevisionLog};
use tokio::{
    sync::mpsc,
    task::spawn_blocking,
    time::{Interval, MissedTickBehavior, sleep},
};
use tokio_util::sync::CancellationToken;

/// The interval of checks of a followed function for new revisions.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// The interval of the sweep for logs of revisions whose deletion was missed.
const SWEEP_EVERY: Duration = Duration::from_secs(60);
/// The capacity of the queue of deleted revisions whose log is to be removed; the sweep removes those that do not fit.
const GONE_MAX: usize = 1024;

/// The informer index of revisions by namespace and function.
const BY_FUNCTION: &str = "kubelet/function";

/// The path of a revision's log, and the revision's identity.
#[derive(Clone)]
pub(crate) struct FunctionLogs {
    layout: LogLayout,
    revisions: Informer<Revision>,
    by_function: Index<Revision>,
}

impl FunctionLogs {
    pub(crate) fn create(layout: LogLayout, revisions: Informer<Revision>) -> Self {
        let by_function = revisions.index(BY_FUNCTION, |revision| {
            let log = log_of(revision);
            vec![format!("{}/{}", log.namespace, log.function)]
        });
        Self { layout, revisions, by_function }
    }

    /// The lines of a function's revisions, or of one of them, in the order of time.
    pub(crate) async fn read(
        self,
        namespace: String,
        function: String,
        only: Option<String>,
        options: LogOptions,
    ) -> io::Result<LogStream> {
        self.revisions.synced().await;
        let wanted = Arc::new(Wanted { logs: self, namespace, function, only });
        let follow = options.follow;
        let lines = LogReader::open(wanted.files().await, options).await?;
        if !follow {
            return Ok(lines.into_stream());
        }
        let mut looks = tokio::time::interval(POLL_INTERVAL);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let followed = Followed { wanted, lines, looks };
        let lines = stream::unfold(followed, |mut followed| async move {
            let line = followed.next().await?;
            Some((line, followed))
        });
        Ok(lines.boxed())
    }

    /// Removes the logs of revisions that are removed, or were removed before the start, until `stop`.
    pub(crate) async fn run(&self, stop: &CancellationToken) {
        let (tell, mut gone) = mpsc::channel(GONE_MAX);
        self.revisions.handle(move |change: Change<'_, Revision>| {
            if let Some(log) = ended(&change) {
                // If the queue is full, the sweep removes the log.
                let _ = tell.try_send(log);
            }
        });
        if stop.run_until_cancelled(self.revisions.synced()).await.is_none() {
            return;
        }
        loop {
            self.sweep().await;
            let next_sweep = sleep(SWEEP_EVERY);
            tokio::pin!(next_sweep);
            loop {
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = &mut next_sweep => break,
                    Some(log) = gone.recv() => self.remove(vec![log]).await,
                }
            }
        }
    }

    /// Removes logs without a revision. Logs are listed before revisions are looked up: a new revision has no log
    /// before the informer has it.
    async fn sweep(&self) {
        let layout = self.layout.clone();
        let mut logs = spawn_blocking(move || layout.revisions()).await.unwrap_or_default();
        logs.retain(|log| {
            let key = ObjectKey::new(&log.namespace, &log.revision);
            self.revisions.get(&key).is_none_or(|revision| log_of(&revision) != *log)
        });
        self.remove(logs).await;
    }

    async fn remove(&self, logs: Vec<RevisionLog>) {
        if logs.is_empty() {
            return;
        }
        let layout = self.layout.clone();
        let remove = move || {
            for log in logs {
                if let Err(error) = layout.remove_revision(&log) {
                    let RevisionLog { namespace, revision, .. } = log;
                    tracing::warn!(namespace, revision, %error, "could not remove the log of a deleted revision; will try again");
                }
            }
        };
        // Fails only when the Tokio runtime shuts down.
        let _ = spawn_blocking(remove).await;
    }
}

fn log_of(revision: &Revision) -> RevisionLog {
    RevisionLog {
        namespace: revision.metadata.namespace.clone().unwrap_or_default(),
        function: revision.spec.function.clone(),
        revision: revision.metadata.name.clone().unwrap_or_default(),
    }
}

/// The log to remove after this change.
fn ended(change: &Change<'_, Revision>) -> Option<RevisionLog> {
    match change {
        Change::Deleted(old) => Some(log_of(old)),
        // The deletion event was missed: a new revision has the same name.
        Change::Updated { old, new } if old.metadata.uid != new.metadata.uid => Some(log_of(old)),
        Change::Added(_) | Change::Updated { .. } => None,
    }
}

/// A requested log.
struct Wanted {
    logs: FunctionLogs,
    namespace: String,
    function: String,
    only: Option<String>,
}

impl Wanted {
    /// The log files of the existing revisions that have written something.
    async fn files(self: &Arc<Self>) -> Vec<PathBuf> {
        let wanted = self.clone();
        let list = move || {
            let Self { logs, namespace, function, only } = &*wanted;
            let revisions = logs.by_function.get(&format!("{namespace}/{function}"));
            let names = revisions.iter().filter_map(|revision| revision.metadata.name.as_ref());
            let names = names.filter(|name| only.as_ref().is_none_or(|only| only == *name));
            let files = names.map(|name| logs.layout.revision(namespace, function, name));
            files.filter(|file| logs::exists(file)).collect()
        };
        spawn_blocking(list).await.unwrap_or_default()
    }
}

/// A followed log of a function.
struct Followed {
    wanted: Arc<Wanted>,
    lines: LogReader,
    looks: Interval,
}

impl Followed {
    async fn next(&mut self) -> Option<io::Result<Bytes>> {
        loop {
            tokio::select! {
                biased;
                _ = self.looks.tick() => {
                    if self.lines.is_live() {
                        let files = self.wanted.files().await;
                        self.lines.follow_only(files);
                    }
                }
                line = self.lines.next() => return line,
            }
        }
    }
}
