//! Events about objects, for `kubectl describe` (core/v1 Event).
//!
//! Recording never waits and never fails: a bounded queue takes the record, a task writes it. Equal events about one
//! object become one Event with a count. Events about one object are limited to a burst of [`BURST`], then one each
//! [`REFILL_EVERY`] (client-go's spam filter).

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use kube::{
    Api, Client, Resource,
    api::{Patch, PatchParams, PostParams},
};
use mayfly_api::k8s::{
    api::core::v1::{Event, EventSource, ObjectReference},
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time},
    jiff::Timestamp,
};
use rand::RngExt as _;
use serde_json::json;
use tokio::{sync::mpsc, time::Instant};
use tokio_util::sync::CancellationToken;

/// The maximum number of queued records. Further ones are dropped: events are informational.
const QUEUE_MAX: usize = 1024;
/// The number of events whose repetition is recognised.
const REMEMBERED_MAX: usize = 4096;
/// The time after its last repetition for which an event counts as the same one.
const SAME_FOR: Duration = Duration::from_secs(600);
/// Events in a row about one object, and how often one more is allowed.
const BURST: u32 = 25;
const REFILL_EVERY: Duration = Duration::from_secs(300);
/// Events that are about cluster-scoped objects live in this namespace, as upstream's do.
const NAMESPACE_OF_CLUSTER_SCOPED: &str = "default";

/// Records events about objects, for one component. Cheap to clone.
#[derive(Clone, Debug)]
pub struct EventRecorder {
    records: mpsc::Sender<Record>,
}

/// The severity of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EventSeverity {
    Normal,
    Warning,
}

#[derive(Debug)]
struct Record {
    regarding: ObjectReference,
    severity: EventSeverity,
    reason: &'static str,
    message: String,
    at: Timestamp,
}

impl EventRecorder {
    /// `component` is shown as the event's source, `host` as its node.
    pub fn start(
        client: Client,
        component: &'static str,
        host: Option<String>,
        stop: CancellationToken,
    ) -> Self {
        let (records, queue) = mpsc::channel(QUEUE_MAX);
        let writer = Writer { client, component, host, memory: RecentEvents::default() };
        tokio::spawn(writer.run(queue, stop));
        Self { records }
    }

    /// Records a normal event. `reason` is one word in UpperCamelCase.
    pub fn normal<K: Resource<DynamicType = ()>>(
        &self,
        about: &K,
        reason: &'static str,
        message: impl Into<String>,
    ) {
        self.say(about.object_ref(&()), EventSeverity::Normal, reason, message.into());
    }

    /// Records an abnormal event, which an operator may want to act on.
    pub fn warning<K: Resource<DynamicType = ()>>(
        &self,
        about: &K,
        reason: &'static str,
        message: impl Into<String>,
    ) {
        self.say(about.object_ref(&()), EventSeverity::Warning, reason, message.into());
    }

    pub fn say(
        &self,
        regarding: ObjectReference,
        severity: EventSeverity,
        reason: &'static str,
        message: String,
    ) {
        let record = Record { regarding, severity, reason, message, at: Timestamp::now() };
        if let Err(mpsc::error::TrySendError::Full(record)) = self.records.try_send(record) {
            tracing::debug!(reason = record.reason, name = ?record.regarding.name, "dropped an event: too many");
        }
    }
}

/// The key by which two records are the same event.
type EventKey = (String, EventSeverity, &'static str, String);

#[derive(Clone, Debug)]
struct Written {
    namespace: String,
    name: String,
    count: i32,
    last: Instant,
}

/// The recently written events.
#[derive(Default)]
struct RecentEvents {
    written: HashMap<EventKey, Written>,
    order: VecDeque<EventKey>,
    budgets: HashMap<String, Budget>,
}

struct Budget {
    left: u32,
    refilled: Instant,
}

impl RecentEvents {
    /// Whether one more event about this object may be written.
    fn allows(&mut self, uid: &str, now: Instant) -> bool {
        if self.budgets.len() >= REMEMBERED_MAX {
            self.budgets.retain(|_, budget| now.duration_since(budget.refilled) < REFILL_EVERY);
        }
        if self.budgets.len() >= REMEMBERED_MAX {
            self.budgets.clear();
        }
        let budget = self.budgets.entry(uid.to_owned()).or_insert(Budget { left: BURST, refilled: now });
        while budget.left < BURST && now.duration_since(budget.refilled) >= REFILL_EVERY {
            budget.left += 1;
            budget.refilled += REFILL_EVERY;
        }
        if budget.left == BURST {
            budget.refilled = now;
        }
        let allowed = budget.left > 0;
        budget.left = budget.left.saturating_sub(1);
        allowed
    }

    /// The event this one repeats, with its count raised.
    fn repeated(&mut self, key: &EventKey, now: Instant) -> Option<Written> {
        let written = self.written.get_mut(key)?;
        if now.duration_since(written.last) > SAME_FOR {
            return None;
        }
        written.count = written.count.saturating_add(1);
        written.last = now;
        Some(written.clone())
    }

    fn remember(&mut self, key: EventKey, written: Written) {
        if self.written.insert(key.clone(), written).is_none() {
            self.order.push_back(key);
        }
        while self.order.len() > REMEMBERED_MAX {
            if let Some(oldest) = self.order.pop_front() {
                self.written.remove(&oldest);
            }
        }
    }
}

struct Writer {
    client: Client,
    component: &'static str,
    host: Option<String>,
    memory: RecentEvents,
}

impl Writer {
    async fn run(mut self, mut queue: mpsc::Receiver<Record>, stop: CancellationToken) {
        loop {
            let record = tokio::select! {
                () = stop.cancelled() => return,
                record = queue.recv() => record,
            };
            let Some(record) = record else { return };
            let reason = record.reason;
            if let Err(error) = self.write(record).await {
                tracing::debug!(reason, %error, "cannot write an event");
            }
        }
    }

    async fn write(&mut self, record: Record) -> kube::Result<()> {
        let now = Instant::now();
        let uid = record.regarding.uid.clone().unwrap_or_default();
        if !self.memory.allows(&uid, now) {
            return Ok(());
        }
        let key = (uid, record.severity, record.reason, record.message.clone());
        if let Some(written) = self.memory.repeated(&key, now) {
            let events: Api<Event> = Api::namespaced(self.client.clone(), &written.namespace);
            let patch = json!({"count": written.count, "lastTimestamp": Time(record.at)});
            match events.patch(&written.name, &PatchParams::default(), &Patch::Merge(patch)).await {
                Err(kube::Error::Api(status)) if status.is_not_found() => {}
                result => return result.map(|_| ()),
            }
        }
        let event = self.event(record);
        let namespace = event.metadata.namespace.clone().unwrap_or_default();
        let name = event.metadata.name.clone().unwrap_or_default();
        let events: Api<Event> = Api::namespaced(self.client.clone(), &namespace);
        events.create(&PostParams::default(), &event).await?;
        self.memory.remember(key, Written { namespace, name, count: 1, last: now });
        Ok(())
    }

    fn event(&self, record: Record) -> Event {
        let regarding = record.regarding;
        let namespace = regarding.namespace.clone().filter(|namespace| !namespace.is_empty());
        let namespace = namespace.unwrap_or_else(|| NAMESPACE_OF_CLUSTER_SCOPED.into());
        let suffix: u64 = rand::rng().random();
        let name = format!("{}.{suffix:016x}", regarding.name.as_deref().unwrap_or("unnamed"));
        Event {
            metadata: ObjectMeta { name: Some(name), namespace: Some(namespace), ..ObjectMeta::default() },
            involved_object: regarding,
            reason: Some(record.reason.into()),
            message: Some(record.message),
            type_: Some(format!("{:?}", record.severity)),
            source: Some(EventSource { component: Some(self.component.into()), host: self.host.clone() }),
            reporting_component: Some(self.component.into()),
            reporting_instance: self.host.clone().or_else(|| Some(String::new())),
            first_timestamp: Some(Time(record.at)),
            last_timestamp: Some(Time(record.at)),
            count: Some(1),
            ..Event::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(message: &str) -> EventKey {
        ("uid".into(), EventSeverity::Normal, "Test", message.into())
    }

    fn written(now: Instant) -> Written {
        Written { namespace: "ns".into(), name: "e".into(), count: 1, last: now }
    }

    #[test]
    fn equal_events_are_counted_while_they_keep_coming() {
        let (mut memory, now) = (RecentEvents::default(), Instant::now());
        assert!(memory.repeated(&key("a"), now).is_none());
        memory.remember(key("a"), written(now));
        assert_eq!(memory.repeated(&key("a"), now + SAME_FOR).map(|w| w.count), Some(2));
        assert_eq!(memory.repeated(&key("a"), now + SAME_FOR * 2).map(|w| w.count), Some(3));
        assert!(memory.repeated(&key("a"), now + SAME_FOR * 4).is_none(), "that was long ago");
        assert!(memory.repeated(&key("b"), now).is_none());
        for n in 0..REMEMBERED_MAX {
            memory.remember(key(&n.to_string()), written(now));
        }
        assert_eq!(memory.written.len(), REMEMBERED_MAX);
        assert!(!memory.written.contains_key(&key("a")), "the oldest goes first");
    }

    #[test]
    fn an_object_has_a_budget_that_comes_back_slowly() {
        let (mut memory, now) = (RecentEvents::default(), Instant::now());
        let burst = (0..100).filter(|_| memory.allows("noisy", now)).count();
        assert_eq!(burst, BURST as usize);
        assert!(memory.allows("quiet", now));
        assert!(memory.allows("noisy", now + REFILL_EVERY));
        assert!(!memory.allows("noisy", now + REFILL_EVERY));
    }
}
