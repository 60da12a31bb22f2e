//! Executions as Kubernetes objects: a read-only view of the journal.
//!
//! Nothing is copied: a list is a page of the journal, newest first, and a watch replays the starts and ends that the
//! engine reports. The newest of them are kept in memory; a watch from before them lists again (410), as with any
//! watch. Revisions are microseconds of the clock, strictly increasing, so that those of an earlier run are recognised
//! as old.

use mayfly_workflows_language::arn::ExecutionArn;
use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

use futures::{
    future::BoxFuture,
    stream::{self, BoxStream, StreamExt as _},
};
use jiff::Timestamp;
use mayfly_api::{Digest, ObjectKey, wellknown::LABEL_WORKFLOW, workflow::names};
use mayfly_apiserver::{KindView, ViewChange, ViewError, ViewEvent, ViewPage, ViewQuery};
use mayfly_workflows_engine::engine::{
    Description, Engine, ExecutionChange, ExecutionChanged, ExecutionOwner, HistoryQuery, ListQuery, Page,
    RunStatus,
};
use parking_lot::RwLock;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::sync::{
    broadcast::{
        Receiver,
        error::{RecvError, TryRecvError},
    },
    watch,
};
use tokio_util::sync::CancellationToken;

use super::{invocations::is_of_invocations, objects::Directory};

/// Changes that are remembered for watches.
const REMEMBERED_MAX: usize = 4_096;
/// The maximum number of changes that are taken over under one lock, for which readers wait.
const TOGETHER_MAX: u64 = 256;
/// The maximum number of executions that are searched for one whose name is a digest.
const LOOKED_THROUGH_MAX: usize = 10_000;
const PAGE: usize = 500;
/// Events of a history that are shown: the last ones.
const HISTORY_MAX: usize = 100;

/// The view. Cheap to clone.
#[derive(Clone)]
pub struct Executions {
    engine: Engine,
    directory: Directory,
    recent: Arc<RwLock<Recent>>,
    /// The newest revision.
    revision: Arc<watch::Sender<u64>>,
}

impl std::fmt::Debug for Executions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Executions").finish_non_exhaustive()
    }
}

/// The newest changes, oldest first.
struct Recent {
    changes: VecDeque<(u64, ExecutionChanged)>,
    /// Changes up to this revision are forgotten.
    forgotten: u64,
}

impl Recent {
    fn remember(&mut self, revision: u64, changed: ExecutionChanged) {
        self.changes.push_back((revision, changed));
        if self.changes.len() > REMEMBERED_MAX
            && let Some((oldest, _)) = self.changes.pop_front()
        {
            self.forgotten = oldest;
        }
    }

    /// Events were missed: every watcher lists again.
    fn forget(&mut self, revision: u64) {
        self.changes.clear();
        self.forgotten = revision;
    }
}

impl Executions {
    pub fn new(engine: Engine, directory: Directory) -> Self {
        let now = microseconds(Timestamp::now());
        let recent = Recent { changes: VecDeque::new(), forgotten: now };
        let revision = Arc::new(watch::Sender::new(now));
        Self { engine, directory, recent: Arc::new(RwLock::new(recent)), revision }
    }

    /// Records the engine's changes, until `stop`. `changes` begin before the engine resumes any execution: a client
    /// that has listed already would miss an end in between.
    pub async fn follow(self, mut changes: Receiver<ExecutionChanged>, stop: CancellationToken) {
        loop {
            let mut told = tokio::select! {
                told = changes.recv() => told,
                () = stop.cancelled() => return,
            };
            let mut revision = microseconds(Timestamp::now()).max(*self.revision.borrow() + 1);
            {
                let mut recent = self.recent.write();
                let first = revision;
                loop {
                    match told {
                        // Not shown here, and many: they would push other changes out.
                        Ok(changed) if is_of_invocations(changed.execution.execution_arn.as_str()) => {}
                        Ok(changed) => recent.remember(revision, changed),
                        Err(RecvError::Lagged(_)) => recent.forget(revision),
                        Err(RecvError::Closed) => return,
                    }
                    // Watchers are woken once for all changes of a batch.
                    if revision - first >= TOGETHER_MAX {
                        break;
                    }
                    told = match changes.try_recv() {
                        Ok(changed) => Ok(changed),
                        Err(TryRecvError::Lagged(missed)) => Err(RecvError::Lagged(missed)),
                        Err(TryRecvError::Empty | TryRecvError::Closed) => break,
                    };
                    revision += 1;
                }
            }
            self.revision.send_replace(revision);
        }
    }

    /// An execution as an object; `status` in the place of its own.
    fn object(&self, found: &Description, whole: bool, status: Option<RunStatus>) -> Value {
        let (workflow, _) = self.directory.place(&found.state_machine_arn);
        object(&workflow, found, whole, status)
    }

    async fn find(&self, namespace: &str, name: &str) -> Result<Option<Description>, ViewError> {
        let Some((workflow, own_name)) = names::parse_execution(name) else { return Ok(None) };
        let machine = self.directory.arn(&ObjectKey::new(namespace, workflow));
        if let Some(own_name) = own_name {
            let Some(prefix) = machine.prefix() else { return Ok(None) };
            let arn = format!("{prefix}:execution:{}:{own_name}", machine.name());
            let arn = ExecutionArn::from_trusted(arn);
            return self.engine.describe(&arn).await.map_err(failed);
        }
        let mut from = None;
        for _ in 0..LOOKED_THROUGH_MAX / PAGE {
            let page = self.page(ExecutionOwner::StateMachine(machine.clone()), None, PAGE, from).await?;
            let is_it = |found: &Description| names::execution(workflow, &found.name) == name;
            if let Some(found) = page.items.into_iter().find(is_it) {
                return Ok(Some(found));
            }
            match page.next {
                Some(next) => from = Some(next),
                None => break,
            }
        }
        Ok(None)
    }

    async fn page(
        &self,
        of: ExecutionOwner,
        status: Option<RunStatus>,
        limit: usize,
        from: Option<String>,
    ) -> Result<Page<Description>, ViewError> {
        let query = ListQuery { owner: of, status, redriven: None, limit, from };
        self.engine.list(query).await.map_err(failed)
    }

    /// A page without invocations. Where they are many, a page may have less items than `limit`, or none, and still a
    /// next one.
    async fn page_of_workflows(
        &self,
        of: ExecutionOwner,
        status: Option<RunStatus>,
        limit: usize,
        from: Option<String>,
    ) -> Result<Page<Description>, ViewError> {
        let (mut items, mut from, mut looked_through) = (Vec::new(), from, 0);
        let mut asked = limit;
        loop {
            let page = self.page(of.clone(), status, asked, from.clone()).await?;
            looked_through += page.items.len();
            let shown = |found: &&Description| !is_of_invocations(found.execution_arn.as_str());
            let mut of_workflows = page.items.iter().enumerate().filter(|(_, found)| shown(found));
            if let Some((index, _)) = of_workflows.nth(limit - items.len()) {
                // Read again without the excess, so that the token is that of the last item.
                asked = index;
                continue;
            }
            items.extend(page.items.into_iter().filter(|found| shown(&found)));
            from = page.next;
            if items.len() >= limit || from.is_none() || looked_through >= LOOKED_THROUGH_MAX {
                return Ok(Page { items, next: from });
            }
            // Where most are invocations, pages of the missing number would be many.
            asked = (asked * 2).min(PAGE);
        }
    }

    /// The last events, a line each.
    async fn history(&self, arn: &ExecutionArn) -> Result<Vec<String>, ViewError> {
        let query = HistoryQuery { reverse: true, include_data: false, limit: HISTORY_MAX, from: None };
        let page = self.engine.history(arn, query).await.map_err(failed)?;
        let mut events = page.map(|page| page.items).unwrap_or_default();
        events.reverse();
        Ok(events.iter().map(line).collect())
    }
}

impl KindView for Executions {
    fn get<'a>(
        &'a self,
        namespace: &'a str,
        name: &'a str,
    ) -> BoxFuture<'a, Result<Option<Value>, ViewError>> {
        Box::pin(async move {
            let Some(found) = self.find(namespace, name).await? else { return Ok(None) };
            let mut object = self.object(&found, true, None);
            // Names that mean the same execution but are not its own are no names of it.
            if object["metadata"]["name"] != name || object["metadata"]["namespace"] != namespace {
                return Ok(None);
            }
            object["status"]["history"] = self.history(&found.execution_arn).await?.into();
            Ok(Some(object))
        })
    }

    fn list(&self, query: ViewQuery) -> BoxFuture<'_, Result<ViewPage, ViewError>> {
        Box::pin(async move {
            let revision = *self.revision.borrow();
            let asked = |field: &str| {
                query.fields.iter().find(|(name, _)| name == field).map(|(_, value)| value.as_str())
            };
            let of = match asked("spec.workflow").filter(|_| !query.namespace.is_empty()) {
                Some(workflow) => ExecutionOwner::StateMachine(
                    self.directory.arn(&ObjectKey::new(query.namespace.as_str(), workflow)),
                ),
                None => ExecutionOwner::Everyone,
            };
            let status = match asked("status.phase") {
                None => None,
                Some(phase) => match RunStatus::parse(phase) {
                    Some(status) => Some(status),
                    // There is no such status, and so no such execution.
                    None => return Ok(ViewPage { revision, ..ViewPage::default() }),
                },
            };
            if query.after.as_ref().is_some_and(|after| after.parse::<u64>().is_err()) {
                return Err(ViewError::Continue);
            }
            let page = self.page_of_workflows(of, status, query.limit, query.after).await?;
            let mut items = Vec::with_capacity(page.items.len());
            let mut workflows = HashMap::new();
            for found in page.items {
                let machine = found.state_machine_arn.clone();
                let workflow = workflows
                    .entry(machine)
                    .or_insert_with(|| self.directory.place(&found.state_machine_arn).0);
                if !query.namespace.is_empty() && workflow.namespace != query.namespace.as_str() {
                    continue;
                }
                let described = match query.whole {
                    true => self.engine.describe(&found.execution_arn).await.map_err(failed)?,
                    false => None,
                };
                items.push(match described {
                    Some(found) => object(workflow, &found, true, None),
                    None => object(workflow, &found, false, None),
                });
            }
            Ok(ViewPage { items, next: page.next, revision })
        })
    }

    fn watch(
        &self,
        after: u64,
        whole: bool,
    ) -> Result<BoxStream<'static, Result<ViewEvent, ViewError>>, ViewError> {
        if after < self.recent.read().forgotten {
            return Err(ViewError::Expired);
        }
        let state = (self.clone(), self.revision.subscribe(), after);
        let events = stream::unfold(state, move |(view, mut newest, mut after)| async move {
            loop {
                match view.since(after, whole).await {
                    Err(error) => return Some((vec![Err(error)], (view, newest, 0))),
                    Ok(events) if !events.is_empty() => {
                        after = events.last().map_or(after, |event| event.revision);
                        let events = events.into_iter().map(Ok).collect();
                        return Some((events, (view, newest, after)));
                    }
                    Ok(_) => newest.changed().await.ok()?,
                }
            }
        });
        Ok(events.flat_map(stream::iter).boxed())
    }

    fn user_of<'a>(&'a self, artifact: &'a Digest) -> BoxFuture<'a, Result<Option<String>, ViewError>> {
        Box::pin(async move {
            let user = self.engine.user_of(*artifact).await.map_err(failed)?;
            Ok(user.map(|arn| format!("the execution {arn}, which has not ended")))
        })
    }

    fn read_only(&self, name: &str) -> String {
        format!(
            "executions are a view of what runs and cannot be written: start one with `mayfly workflow start \
             WORKFLOW -d JSON`, stop one with `mayfly workflow stop` (kubectl describe execution {name} shows its \
             ARN)"
        )
    }
}

impl Executions {
    /// The changes after a revision, as many as are worth a frame.
    async fn since(&self, after: u64, whole: bool) -> Result<Vec<ViewEvent>, ViewError> {
        const FRAME: usize = 256;
        let changes: Vec<_> = {
            let recent = self.recent.read();
            if after < recent.forgotten {
                return Err(ViewError::Expired);
            }
            let start = recent.changes.partition_point(|(revision, _)| *revision <= after);
            recent.changes.range(start..).take(FRAME).cloned().collect()
        };
        let mut events = Vec::with_capacity(changes.len());
        for (revision, changed) in changes {
            events.push(self.event(revision, changed, whole).await?);
        }
        Ok(events)
    }

    async fn event(
        &self,
        revision: u64,
        changed: ExecutionChanged,
        whole: bool,
    ) -> Result<ViewEvent, ViewError> {
        let ExecutionChanged { change, execution } = changed;
        let mut shown = Description::clone(&execution);
        if whole && let Some(now) = self.engine.describe(&shown.execution_arn).await.map_err(failed)? {
            shown.input = now.input;
            if shown.status != RunStatus::Running {
                (shown.output, shown.cause) = (now.output, now.cause);
            }
        }
        let with_revision = |mut object: Value| {
            object["metadata"]["resourceVersion"] = revision.to_string().into();
            object
        };
        let change = match change {
            ExecutionChange::Started => ViewChange::Created,
            // Taken up again: it had failed; otherwise it was running.
            ExecutionChange::Moved => {
                let before = match shown.status {
                    RunStatus::Running => RunStatus::Failed,
                    _ => RunStatus::Running,
                };
                ViewChange::Modified { previous: with_revision(self.object(&shown, whole, Some(before))) }
            }
        };
        Ok(ViewEvent { change, revision, object: with_revision(self.object(&shown, whole, None)) })
    }
}

/// An execution of a workflow as an object; `status` in the place of its own.
fn object(workflow: &ObjectKey, found: &Description, whole: bool, status: Option<RunStatus>) -> Value {
    let shown = status.unwrap_or(found.status);
    let running = shown == RunStatus::Running;
    let changed = found.stop_date.filter(|_| !running).max(found.redrive_date).unwrap_or(found.start_date);
    let time = |at: Timestamp| format!("{at:.3}");
    let mut object = json!({
        "apiVersion": "mayfly.dev/v1",
        "kind": "Execution",
        "metadata": {
            "name": names::execution(&workflow.name, &found.name),
            "namespace": workflow.namespace,
            "uid": uid(&found.execution_arn),
            "resourceVersion": microseconds(changed).to_string(),
            "creationTimestamp": super::seconds_text(found.start_date),
            "labels": {LABEL_WORKFLOW: workflow.name},
        },
        "spec": {
            "workflow": workflow.name,
            "name": found.name,
            "executionArn": found.execution_arn.as_str(),
            "stateMachineArn": found.state_machine_arn.as_str(),
        },
        "status": {"phase": shown.as_str(), "startTime": time(found.start_date)},
    });
    let status = &mut object["status"];
    if found.redrive_count > 0 {
        status["redriveCount"] = found.redrive_count.into();
    }
    if !running {
        let optional = [
            ("stopTime", found.stop_date.map(time)),
            ("error", found.error.clone()),
            ("cause", found.cause.clone().filter(|_| whole)),
            ("output", found.output.as_deref().filter(|_| whole).map(str::to_owned)),
        ];
        for (field, value) in optional {
            if let Some(value) = value {
                status[field] = value.into();
            }
        }
    }
    if whole {
        object["spec"]["input"] = Value::from(&*found.input);
    }
    object
}

/// `3 10:00:00.012 TaskStateEntered Charge`.
pub(crate) fn line(event: &Value) -> String {
    let at = event["timestamp"].as_f64().unwrap_or_default();
    #[expect(clippy::cast_possible_truncation, reason = "milliseconds since the epoch fit")]
    let at = Timestamp::from_millisecond((at * 1_000.0).round() as i64).unwrap_or_default();
    let kind = event["type"].as_str().unwrap_or_default();
    let details = event.as_object().into_iter().flatten().find(|(name, _)| name.ends_with("EventDetails"));
    let detail = |field: &str| details.and_then(|(_, details)| details[field].as_str());
    let about = detail("name").or(detail("error")).or(detail("resource")).unwrap_or_default();
    format!("{} {} {kind} {about}", event["id"], at.strftime("%H:%M:%S%.3f")).trim_end().to_owned()
}

fn microseconds(at: Timestamp) -> u64 {
    u64::try_from(at.as_microsecond()).unwrap_or(0)
}

/// The same for the same execution, and for no other.
fn uid(arn: &ExecutionArn) -> String {
    let digest = Sha256::digest(arn.as_str());
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&digest[..16]);
    uuid::Builder::from_random_bytes(bytes).into_uuid().to_string()
}

fn failed(error: impl std::fmt::Display) -> ViewError {
    ViewError::Failed(error.to_string())
}
