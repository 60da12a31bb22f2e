//! The event patterns of all triggers, and what an event starts.

use std::{collections::BTreeMap, sync::Arc};

use mayfly_api::workflow::{Trigger, pattern::Pattern};
use parking_lot::RwLock;
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use tokio::sync::mpsc;

use super::{StartOutcome, StartTarget, Starter, TriggerOwner, Triggered};

/// Notes of starts that wait to be written into a status; what does not fit is not noted.
const NOTES_MAX: usize = 1_024;
/// Longest part of an execution's name that an event's id is taken over into as it is.
const ID_BYTES_MAX: usize = 36;

/// The event triggers of all workflows and functions. Cheap to clone.
#[derive(Clone)]
pub struct EventRules {
    starter: Starter,
    rules: Arc<RwLock<Rules>>,
    notes: mpsc::Sender<Fired>,
}

impl std::fmt::Debug for EventRules {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EventRules").finish_non_exhaustive()
    }
}

/// The rules of each workflow and function.
#[derive(Clone, Debug, Default)]
struct Rules(Arc<BTreeMap<TriggerOwner, Known>>);

/// The rules of one object, as of this generation of its spec.
#[derive(Clone, Debug)]
struct Known {
    uid: Option<String>,
    generation: Option<i64>,
    rules: Arc<[Rule]>,
}

impl Rules {
    /// An object as it is now; `None` when it is deleted or being deleted. Most changes are of its status, and cost
    /// nothing.
    fn set(&mut self, key: &TriggerOwner, object: Option<&Triggered<'_>>) {
        let Some(object) = object else {
            if self.0.contains_key(key) {
                Arc::make_mut(&mut self.0).remove(key);
            }
            return;
        };
        let (uid, generation) = (object.uid, object.generation);
        if self.0.get(key).is_some_and(|known| known.uid == *uid && known.generation == generation) {
            return;
        }
        let known = Known { uid: uid.clone(), generation, rules: of(object).into() };
        Arc::make_mut(&mut self.0).insert(key.clone(), known);
    }
}

/// One trigger.
#[derive(Debug)]
struct Rule {
    owner: TriggerOwner,
    target: StartTarget,
    trigger: Trigger,
    pattern: Pattern,
}

/// An event started something, or could not.
#[derive(Debug)]
pub struct Fired {
    pub(super) owner: TriggerOwner,
    pub(super) trigger: String,
    pub(super) execution: String,
    pub(super) error: Option<String>,
}

impl EventRules {
    /// The rules, none yet, and where they note what they start.
    pub(super) fn new(starter: Starter) -> (Self, mpsc::Receiver<Fired>) {
        let (notes, noted) = mpsc::channel(NOTES_MAX);
        (Self { starter, rules: Arc::default(), notes }, noted)
    }

    /// Takes in an object as it is now; `None` when it is deleted or being deleted.
    pub(super) fn set(&self, key: &TriggerOwner, object: Option<&Triggered<'_>>) {
        self.rules.write().set(key, object);
    }

    /// Starts what an event is to start. `identity` tells one event from another: the same twice starts nothing
    /// more. When this returns every start is durable.
    ///
    /// # Errors
    /// Something that may go well the next time did not: send the event again.
    pub async fn publish(&self, event: &Value, identity: &str) -> Result<(), String> {
        let rules = self.rules.read().clone();
        let rules = rules.0.values().flat_map(|known| known.rules.iter());
        let mut failure = None;
        for rule in rules.filter(|rule| !rule.trigger.suspend && rule.pattern.matches(event)) {
            let execution = execution_name(&rule.trigger.name, identity);
            let started = self.starter.start(&rule.target, &execution, &input(&rule.trigger, event)).await;
            let error = match started {
                StartOutcome::Started(_) => None,
                StartOutcome::AlreadyStarted => continue,
                StartOutcome::Refused(why) => Some(why),
                StartOutcome::Failed(why) => {
                    failure = Some(why.clone());
                    Some(why)
                }
            };
            let (owner, trigger) = (rule.owner.clone(), rule.trigger.name.clone());
            // Only the status is poorer without it.
            let _ = self.notes.try_send(Fired { owner, trigger, execution, error });
        }
        failure.map_or(Ok(()), Err)
    }
}

fn of(object: &Triggered<'_>) -> Vec<Rule> {
    let triggers = object.triggers.iter().filter_map(|trigger| {
        // Invalid patterns were refused by the validation.
        let pattern = Pattern::parse(&trigger.event.as_ref()?.pattern).ok()?;
        let (owner, target) = (object.owner.clone(), object.target.clone());
        Some(Rule { owner, target, trigger: trigger.clone(), pattern })
    });
    triggers.collect()
}

fn input(trigger: &Trigger, event: &Value) -> Value {
    match (&trigger.input, &trigger.input_transform) {
        (Some(input), _) => input.clone(),
        (None, Some(transform)) => transform.apply(event),
        (None, None) => event.clone(),
    }
}

/// `paid-<the event's id>`; a digest of it where it would make no good name.
fn execution_name(trigger: &str, identity: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let is_name = !identity.is_empty()
        && identity.len() <= ID_BYTES_MAX
        && identity.bytes().all(plain)
        && !identity.ends_with('-');
    match is_name {
        true => format!("{trigger}-{identity}"),
        false => format!("{trigger}-{}", hex::encode(&Sha256::digest(identity)[..16])),
    }
}

#[cfg(test)]
mod tests {
    use mayfly_api::{ObjectKey, Workflow};
    use serde_json::json;

    use super::*;

    #[test]
    fn a_status_compiles_no_pattern_anew() {
        let key = TriggerOwner::Workflow(ObjectKey::new("default", "w"));
        let workflow = |uid: &str, generation: i64, source: &str| -> Workflow {
            let trigger = json!({"name": "t", "event": {"pattern": {"source": [source]}}});
            serde_json::from_value(json!({"apiVersion": "mayfly.dev/v1", "kind": "Workflow",
                "metadata": {"name": "w", "namespace": "default", "uid": uid, "generation": generation},
                "spec": {"definition": {}, "triggers": [trigger]}}))
            .unwrap()
        };
        let mut rules = Rules::default();
        let matches = |rules: &Rules, source: &str| {
            let event = json!({"source": source});
            rules
                .0
                .values()
                .flat_map(|known| known.rules.iter())
                .filter(|rule| rule.pattern.matches(&event))
                .count()
        };
        rules.set(&key, Some(&Triggered::workflow(&workflow("u", 1, "a"))));
        let compiled = rules.0[&key].rules.clone();
        rules.set(&key, Some(&Triggered::workflow(&workflow("u", 1, "a"))));
        assert!(Arc::ptr_eq(&compiled, &rules.0[&key].rules), "nothing changed but the status");
        for (uid, generation, source) in [("u", 2, "b"), ("another", 2, "c")] {
            rules.set(&key, Some(&Triggered::workflow(&workflow(uid, generation, source))));
            assert_eq!((matches(&rules, "a"), matches(&rules, source)), (0, 1), "{uid} {generation}");
        }
        rules.set(&key, None);
        assert_eq!(matches(&rules, "c"), 0);
    }

    #[test]
    fn executions_are_named_after_the_event() {
        let id = "5f0c2f4e-9b1d-4d7e-8a63-0f2f3a9f7f10";
        assert_eq!(execution_name("paid", id), format!("paid-{id}"));
        let long = execution_name("paid", "https://shop.example/orders\n7");
        assert!(long.len() == "paid-".len() + 32 && mayfly_api::names::dns_label(&long).is_ok(), "{long}");
        assert_eq!(execution_name("paid", "X"), execution_name("paid", "X"));
        assert_ne!(execution_name("paid", "X"), execution_name("paid", "x"));
    }
}
