//! Keeps the state of every trigger, starts what is due, and writes the state to the objects.

use mayfly_workflows_language::arn::ExecutionArn;
use std::{collections::HashMap, sync::Arc, time::Duration};

use jiff::{SignedDuration, Timestamp};
use kube::{
    Client,
    api::{Api as Kinds, Patch, PatchParams},
};
use mayfly_api::{
    Function, ObjectKey, Workflow,
    k8s::apimachinery::pkg::apis::meta::v1::Time,
    workflow::{Overlap, Schedule, Trigger, TriggerStatus, schedule::Times},
};
use mayfly_informer::Informer;
use mayfly_workflows_engine::engine::{Engine, RunStatus};
use mayfly_workflows_engine::service::WorkflowService;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::{
    EventRules, Fired, StartOutcome, StartTarget, Starter, TriggerOwner, Triggered,
    plan::{ScheduleRule, Step, plan},
};
use crate::invocations::Invocations;

/// The pause after a start that failed for a reason of the server.
const RETRY: SignedDuration = SignedDuration::from_secs(5);
/// Longest sleep: the machine's clock may be set while we sleep.
const SLEEP_MAX: Duration = Duration::from_secs(60);
/// Steps that one trigger may take before the others get their turn.
const STEPS_MAX: usize = 100;
/// The greatest lead of a trigger's state over the clock. A smaller one is waited for, so that a clock that is set back
/// starts nothing twice; a greater one is from a time at which the clock was wrong.
const AHEAD_MAX: SignedDuration = SignedDuration::from_hours(24);

/// Runs the triggers of all workflows and functions.
pub struct Triggers {
    starter: Starter,
    engine: Engine,
    client: Client,
    workflows: Informer<Workflow>,
    functions: Informer<Function>,
    events: EventRules,
    noted: mpsc::Receiver<Fired>,
    known: HashMap<TriggerOwner, Known>,
}

impl std::fmt::Debug for Triggers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Triggers").finish_non_exhaustive()
    }
}

/// The triggers of an object.
struct Known {
    uid: Option<String>,
    generation: Option<i64>,
    target: StartTarget,
    triggers: Vec<Running>,
    /// The status says something else than the state.
    dirty: bool,
}

/// One trigger.
struct Running {
    trigger: Trigger,
    /// `None`: an event trigger, or one that is suspended.
    rule: Option<ScheduleRule>,
    status: TriggerStatus,
    /// When to look again.
    wake: Option<Timestamp>,
}

impl Triggers {
    pub fn new(
        service: WorkflowService,
        invocations: Arc<Invocations>,
        engine: Engine,
        client: Client,
        workflows: Informer<Workflow>,
        functions: Informer<Function>,
    ) -> Self {
        let starter = Starter { service, invocations };
        let (events, noted) = EventRules::new(starter.clone());
        Self { starter, engine, client, workflows, functions, events, noted, known: HashMap::new() }
    }

    /// The receiver of events.
    pub fn events(&self) -> EventRules {
        self.events.clone()
    }

    /// Runs until `stop`.
    pub async fn run(mut self, stop: CancellationToken) {
        tokio::select! {
            () = async { tokio::join!(self.workflows.synced(), self.functions.synced()); } => {}
            () = stop.cancelled() => return,
        }
        let mut of_workflows = self.workflows.subscribe();
        let mut of_functions = self.functions.subscribe();
        for object in self.workflows.list() {
            self.look(&TriggerOwner::Workflow(ObjectKey::of(&*object)));
        }
        for object in self.functions.list() {
            self.look(&TriggerOwner::Function(ObjectKey::of(&*object)));
        }
        loop {
            let now = Timestamp::now();
            let work = async {
                let next = self.advance(now).await;
                self.write_down().await;
                next
            };
            // A stop waits for no disk: what is done twice after it is recognised.
            let next = tokio::select! {
                () = stop.cancelled() => return,
                next = work => next,
            };
            let pause = next.map_or(SLEEP_MAX, |next| {
                Duration::try_from(next.duration_since(Timestamp::now()))
                    .unwrap_or(Duration::ZERO)
                    .min(SLEEP_MAX)
            });
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
                Some(fired) = self.noted.recv() => self.note(fired),
                keys = of_workflows.next() => {
                    keys.iter().for_each(|key| self.look(&TriggerOwner::Workflow(key.clone())));
                }
                keys = of_functions.next() => {
                    keys.iter().for_each(|key| self.look(&TriggerOwner::Function(key.clone())));
                }
            }
        }
    }

    /// Takes in an object as it is now, or that it is deleted or being deleted.
    fn look(&mut self, owner: &TriggerOwner) {
        match owner {
            TriggerOwner::Workflow(key) => {
                let object = self.workflows.get(key);
                let object = object.as_deref().filter(|object| object.metadata.deletion_timestamp.is_none());
                self.take_in(owner, object.map(Triggered::workflow));
            }
            TriggerOwner::Function(key) => {
                let object = self.functions.get(key);
                let object = object.as_deref().filter(|object| object.metadata.deletion_timestamp.is_none());
                self.take_in(owner, object.map(Triggered::function));
            }
        }
    }

    fn take_in(&mut self, owner: &TriggerOwner, object: Option<Triggered<'_>>) {
        // Most functions have no triggers.
        let object = object.filter(|object| !object.triggers.is_empty() || !object.stored.is_empty());
        self.events.set(owner, object.as_ref());
        match object {
            Some(object) => self.meet(&object, Timestamp::now()),
            None => _ = self.known.remove(owner),
        }
    }

    /// Takes in an object that is new or has changed.
    fn meet(&mut self, object: &Triggered<'_>, now: Timestamp) {
        let before = self.known.get(&object.owner).filter(|known| known.uid == *object.uid);
        if before.is_some_and(|known| known.generation == object.generation) {
            return;
        }
        let stored = object.stored;
        let status_of = |name: &str| {
            let running = before.and_then(|known| known.triggers.iter().find(|one| one.trigger.name == name));
            running.map(|one| (&one.status, one.trigger.suspend)).or_else(|| {
                // Read for the first time in this process: whether it was suspended before is unknown, so the spec
                // decides.
                stored.iter().find(|status| status.name == name).map(|status| (status, false))
            })
        };
        let uid = object.uid.clone();
        let triggers: Vec<Running> = object
            .triggers
            .iter()
            .map(|trigger| {
                let seed = format!("{}/{}", uid.as_deref().unwrap_or_default(), trigger.name);
                running(trigger, status_of(&trigger.name), seed, now)
            })
            .collect();
        let dirty = stored.len() != triggers.len() || !triggers.is_empty();
        let (generation, target) = (object.generation, object.target.clone());
        self.known.insert(object.owner.clone(), Known { uid, generation, target, triggers, dirty });
    }

    /// Does what is due; says when the next thing is.
    async fn advance(&mut self, now: Timestamp) -> Option<Timestamp> {
        let mut next = None;
        for known in self.known.values_mut() {
            for running in &mut known.triggers {
                if running.wake.is_none_or(|wake| wake <= now) && running.rule.is_some() {
                    known.dirty |= step(&self.starter, &self.engine, &known.target, running, now).await;
                }
                if running.rule.is_some() {
                    next = next.into_iter().chain(running.wake).min();
                }
            }
        }
        next
    }

    /// Takes in what events started.
    fn note(&mut self, fired: Fired) {
        let Some(known) = self.known.get_mut(&fired.owner) else { return };
        let named = known.triggers.iter_mut().find(|running| running.trigger.name == fired.trigger);
        let Some(running) = named else { return };
        started(&mut running.status, fired.execution, fired.error);
        known.dirty = true;
    }

    /// Writes the states into the objects' status where they differ. What cannot be written now is written with the
    /// next change; a crash before that repeats starts that are recognised.
    async fn write_down(&mut self) {
        for (owner, known) in self.known.iter_mut().filter(|(_, known)| known.dirty) {
            let triggers: Vec<&TriggerStatus> =
                known.triggers.iter().map(|running| &running.status).collect();
            let patch = json!({"metadata": {"uid": known.uid}, "status": {"triggers": triggers}});
            let written = match owner {
                TriggerOwner::Workflow(key) => patch_status::<Workflow>(&self.client, key, &patch).await,
                TriggerOwner::Function(key) => patch_status::<Function>(&self.client, key, &patch).await,
            };
            match written {
                Ok(()) => known.dirty = false,
                Err(kube::Error::Api(status)) if status.is_not_found() => known.dirty = false,
                // Another object has its name; else it was only changed too often meanwhile.
                Err(kube::Error::Api(status)) if status.is_conflict() => {
                    let now = match owner {
                        TriggerOwner::Workflow(key) => {
                            self.workflows.get(key).map(|object| object.metadata.uid.clone())
                        }
                        TriggerOwner::Function(key) => {
                            self.functions.get(key).map(|object| object.metadata.uid.clone())
                        }
                    };
                    known.dirty = now.is_some_and(|uid| uid == known.uid);
                }
                Err(error) => {
                    tracing::warn!(?owner, %error, "the triggers' status cannot be written yet")
                }
            }
        }
    }
}

async fn patch_status<K>(client: &Client, key: &ObjectKey, patch: &Value) -> kube::Result<()>
where
    K: kube::Resource<Scope = kube::core::NamespaceResourceScope, DynamicType = ()>
        + Clone
        + std::fmt::Debug
        + serde::de::DeserializeOwned,
{
    let kinds = Kinds::<K>::namespaced(client.clone(), &key.namespace);
    kinds.patch_status(&key.name, &PatchParams::default(), &Patch::Merge(patch)).await.map(drop)
}

/// A trigger with what is known of it.
fn running(
    trigger: &Trigger,
    before: Option<(&TriggerStatus, bool)>,
    seed: String,
    now: Timestamp,
) -> Running {
    let mut status = before.map(|(status, _)| status.clone()).unwrap_or_default();
    status.name.clone_from(&trigger.name);
    let Some(schedule) = &trigger.schedule else {
        let status = TriggerStatus { schedule: None, since: None, next_schedule_time: None, ..status };
        return Running { trigger: trigger.clone(), rule: None, status, wake: None };
    };
    let text = schedule_text(schedule);
    let resumed = before.is_some_and(|(_, suspended)| suspended) && !trigger.suspend;
    if status.schedule.as_ref() != Some(&text) || status.since.is_none() || resumed || trigger.suspend {
        status.since = Some(Time(now));
        status.schedule = Some(text);
    }
    status.next_schedule_time = None;
    let rule = compile(schedule, seed, now).filter(|_| !trigger.suspend);
    Running { trigger: trigger.clone(), rule, status, wake: None }
}

/// The schedule as text; a changed schedule starts without its earlier times.
fn schedule_text(schedule: &Schedule) -> String {
    format!("{} {}", schedule.cron, schedule.time_zone.as_deref().unwrap_or("UTC"))
}

fn compile(schedule: &Schedule, seed: String, now: Timestamp) -> Option<ScheduleRule> {
    let span =
        |span: mayfly_api::duration::Span| SignedDuration::try_from(span.0).unwrap_or(SignedDuration::MAX);
    Some(ScheduleRule {
        // Invalid schedules were refused by the validation.
        times: Times::parse(&schedule.cron, schedule.time_zone.as_deref(), now).ok()?,
        overlap: schedule.overlap,
        catch_up: schedule.catch_up,
        deadline: schedule.starting_deadline.map(span),
        jitter: schedule.jitter.map_or(Duration::ZERO, |jitter| jitter.0),
        seed,
    })
}

/// Does what one trigger has to do now; says whether its status is another one after it.
async fn step(
    starter: &Starter,
    engine: &Engine,
    target: &StartTarget,
    running: &mut Running,
    now: Timestamp,
) -> bool {
    let Some(rule) = running.rule.clone() else { return false };
    let before = running.status.clone();
    for _ in 0..STEPS_MAX {
        forget_ended(engine, &mut running.status).await;
        let status = &mut running.status;
        begin_anew_if_ahead(status, now);
        let since = status.since.as_ref().map_or(now, |time| time.0);
        let decided = status.last_schedule_time.as_ref().map_or(since, |time| time.0.max(since));
        match plan(&rule, decided, !status.active.is_empty(), now) {
            Step::Wait(until) => {
                running.wake = Some(until.unwrap_or(Timestamp::MAX));
                running.status.next_schedule_time = rule.times.after(decided).map(Time);
                return running.status != before;
            }
            Step::Skip { through, why } => {
                status.last_schedule_time = Some(Time(through));
                status.skipped += 1;
                status.message = Some(format!("{through} {}", why.message()));
            }
            Step::Start { scheduled, replace } => {
                if replace {
                    stop_active(engine, status).await;
                }
                let name = format!("{}-{}", running.trigger.name, scheduled.strftime("%Y%m%dt%H%M%Sz"));
                let input = input(&running.trigger, scheduled);
                let error = match starter.start(target, &name, &input).await {
                    StartOutcome::Started(arn) => {
                        if rule.overlap != Overlap::Allow {
                            status.active.push(arn.to_string());
                        }
                        None
                    }
                    StartOutcome::AlreadyStarted => None,
                    StartOutcome::Refused(why) => Some(why),
                    StartOutcome::Failed(why) => {
                        tracing::warn!(
                            ?target,
                            trigger = running.trigger.name,
                            why,
                            "a start failed, will try again"
                        );
                        status.message = Some(why);
                        running.wake = now.checked_add(RETRY).ok();
                        return running.status != before;
                    }
                };
                started(status, name, error);
                status.last_schedule_time = Some(Time(scheduled));
            }
        }
    }
    running.wake = Some(now);
    true
}

/// Lets a schedule begin at `now` whose state is from the far future: otherwise it would start nothing until then.
fn begin_anew_if_ahead(status: &mut TriggerStatus, now: Timestamp) {
    let is_ahead =
        |time: &Option<Time>| time.as_ref().is_some_and(|time| time.0.duration_since(now) > AHEAD_MAX);
    if is_ahead(&status.since) || is_ahead(&status.last_schedule_time) {
        status.since = Some(Time(now));
        status.last_schedule_time = None;
        status.message =
            Some("the clock was set back by more than a day: the schedule begins anew".to_owned());
    }
}

fn started(status: &mut TriggerStatus, execution: String, error: Option<String>) {
    match error {
        None => {
            status.last_start_time = Some(Time(Timestamp::now()));
            status.last_execution = Some(execution);
            status.message = None;
        }
        Some(why) => {
            status.skipped += 1;
            status.message = Some(format!("{execution} not started: {why}"));
        }
    }
}

fn input(trigger: &Trigger, scheduled: Timestamp) -> Value {
    let own = || json!({"trigger": trigger.name, "scheduledTime": scheduled.to_string()});
    trigger.input.clone().unwrap_or_else(own)
}

async fn forget_ended(engine: &Engine, status: &mut TriggerStatus) {
    let mut still = Vec::new();
    for arn in status.active.drain(..) {
        match engine.describe(&ExecutionArn::from_trusted(arn.as_str())).await {
            Ok(Some(found)) if found.status != RunStatus::Running => {}
            Ok(None) => {}
            // An execution that cannot be read may be running.
            Ok(Some(_)) | Err(_) => still.push(arn),
        }
    }
    status.active = still;
}

async fn stop_active(engine: &Engine, status: &mut TriggerStatus) {
    for arn in status.active.drain(..) {
        let cause = Some("a later start of the same trigger took its place (overlap: Replace)".to_owned());
        if let Err(error) = engine
            .stop(&ExecutionArn::from_trusted(arn.as_str()), Some("Mayfly.Replaced".to_owned()), cause)
            .await
        {
            tracing::warn!(arn, %error, "an execution that is to be replaced cannot be stopped");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    fn trigger(value: Value) -> Trigger {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn a_schedule_begins_anew_when_it_is_new_or_resumed() {
        let (then, now) = (at("2026-11-21T10:00:00Z"), at("2026-11-22T10:00:00Z"));
        let hourly = trigger(json!({"name": "h", "schedule": {"cron": "0 * * * *"}}));
        let first = running(&hourly, None, String::new(), then);
        assert_eq!(first.status.since, Some(Time(then)));
        // After a restart it continues at the stored time.
        let again = running(&hourly, Some((&first.status, false)), String::new(), now);
        assert_eq!(again.status.since, Some(Time(then)));
        let resumed = running(&hourly, Some((&first.status, true)), String::new(), now);
        assert_eq!(resumed.status.since, Some(Time(now)));
        let other = trigger(json!({"name": "h", "schedule": {"cron": "30 * * * *"}}));
        assert_eq!(
            running(&other, Some((&first.status, false)), String::new(), now).status.since,
            Some(Time(now))
        );
        let suspended = trigger(json!({"name": "h", "suspend": true, "schedule": {"cron": "0 * * * *"}}));
        assert!(running(&suspended, Some((&first.status, false)), String::new(), now).rule.is_none());
    }

    #[test]
    fn a_schedule_does_not_wait_for_a_wrong_clock() {
        let now = at("2026-11-21T10:00:00Z");
        let state = |since: &str, last: Option<&str>| TriggerStatus {
            since: Some(Time(at(since))),
            last_schedule_time: last.map(|last| Time(at(last))),
            ..TriggerStatus::default()
        };
        for (before, is_anew) in [
            (state("2026-11-20T10:00:00Z", Some("2026-11-21T09:00:00Z")), false),
            // Set back by an hour: what was started is not started again.
            (state("2026-11-20T10:00:00Z", Some("2026-11-21T11:00:00Z")), false),
            (state("2026-11-22T10:00:00Z", None), false),
            (state("2026-11-20T10:00:00Z", Some("2038-01-19T03:00:00Z")), true),
            (state("2038-01-19T03:00:00Z", None), true),
        ] {
            let mut after = before.clone();
            begin_anew_if_ahead(&mut after, now);
            if is_anew {
                assert_eq!((after.since, after.last_schedule_time), (Some(Time(now)), None), "{before:?}");
            } else {
                assert_eq!(after, before);
            }
        }
    }

    #[test]
    fn inputs_are_the_same_for_the_same_time() {
        let plain = trigger(json!({"name": "h", "schedule": {"cron": "0 * * * *"}}));
        let time = at("2026-11-21T10:00:00Z");
        assert_eq!(input(&plain, time), json!({"trigger": "h", "scheduledTime": "2026-11-21T10:00:00Z"}));
        let own = trigger(json!({"name": "h", "schedule": {"cron": "0 * * * *"}, "input": {"a": 1}}));
        assert_eq!(input(&own, time), json!({"a": 1}));
    }
}
