//! The records of the catalog.

use mayfly_workflows_language::arn::{ActivityArn, StateMachineArn};
use mayfly_workflows_language::definition::StateMachineType;
use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::{Arc, OnceLock};

use super::configuration::{EncryptionConfiguration, LoggingConfiguration, TracingConfiguration};
use crate::engine;
use serde::{Deserialize, Serialize};

/// The content of one revision of a state machine. Times are milliseconds since the epoch.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MachineRevision {
    /// None for the revision that CreateStateMachine made, as on AWS.
    pub id: Option<String>,
    /// The definition as it was sent.
    #[serde(with = "shared_text")]
    pub definition: Arc<str>,
    /// The role named at creation or update.
    pub role_arn: String,
    /// The logging of executions.
    pub logging: LoggingConfiguration,
    /// The tracing of executions.
    #[serde(with = "tracing_flag")]
    pub tracing: TracingConfiguration,
    /// The encryption of executions.
    pub encryption: EncryptionConfiguration,
    /// When this revision came to be.
    pub updated: i64,
    /// The compiled definition: a cache, filled at the first use.
    #[serde(skip)]
    pub(crate) compiled: OnceLock<Arc<engine::StartedMachine>>,
}

impl MachineRevision {
    /// A revision as CreateStateMachine makes it: without an id.
    pub fn new(
        definition: &str,
        role_arn: &str,
        logging: LoggingConfiguration,
        tracing: TracingConfiguration,
        encryption: EncryptionConfiguration,
        now: i64,
    ) -> MachineRevision {
        MachineRevision {
            id: None,
            definition: definition.into(),
            role_arn: role_arn.to_owned(),
            logging,
            tracing,
            encryption,
            updated: now,
            compiled: OnceLock::new(),
        }
    }

    /// Whether two revisions would run and log alike.
    pub(crate) fn has_same_content(&self, other: &MachineRevision) -> bool {
        self.definition == other.definition
            && self.role_arn == other.role_arn
            && self.logging == other.logging
            && self.tracing == other.tracing
            && self.encryption == other.encryption
    }
}

/// Tracing is stored as a flag.
mod tracing_flag {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::TracingConfiguration;

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
    pub(super) fn serialize<S: Serializer>(
        tracing: &TracingConfiguration,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        tracing.enabled.serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<TracingConfiguration, D::Error> {
        bool::deserialize(deserializer).map(|enabled| TracingConfiguration { enabled })
    }
}

/// A shared text is stored as a text.
mod shared_text {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use std::sync::Arc;

    pub(super) fn serialize<S: Serializer>(text: &Arc<str>, serializer: S) -> Result<S::Ok, S::Error> {
        str::serialize(text, serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Arc<str>, D::Error> {
        String::deserialize(deserializer).map(Into::into)
    }
}

/// A state machine and its newest revision.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MachineRecord {
    /// Without qualifier.
    pub arn: StateMachineArn,
    /// Unique in its account and region.
    pub name: String,
    /// Never changes.
    pub kind: StateMachineType,
    /// When it was created.
    pub created: i64,
    /// The newest revision.
    pub revision: MachineRevision,
    /// The number that the next version gets; numbers are never given twice.
    pub next_version: u64,
    /// Deleted, but executions still run.
    pub deleting: bool,
    /// The version it was created with: that belongs to the check of idempotency.
    pub published_at_creation: Option<Publication>,
    /// Tags by key.
    pub tags: BTreeMap<String, String>,
}

/// That a version is wanted: `publish` and `versionDescription` of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "PublicationRecord")]
pub struct Publication {
    /// The publisher's description of the version.
    pub description: Option<String>,
}

/// The form in which it is read. Older records have the description alone, or nothing for a version without one.
#[derive(Deserialize)]
#[serde(untagged)]
enum PublicationRecord {
    Described(String),
    Whole { description: Option<String> },
}

impl From<PublicationRecord> for Publication {
    fn from(record: PublicationRecord) -> Self {
        match record {
            PublicationRecord::Described(text) => Self { description: Some(text) },
            PublicationRecord::Whole { description } => Self { description },
        }
    }
}

/// A published version: a revision that cannot change any more.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Version {
    /// `<machine>:<number>`.
    pub arn: StateMachineArn,
    /// The machine it is a version of.
    pub machine_arn: StateMachineArn,
    /// From 1.
    pub number: u64,
    /// The version's description.
    pub description: Option<String>,
    /// When it was published.
    pub created: i64,
    /// The published revision.
    pub revision: MachineRevision,
}

/// A share of an alias's traffic.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// The version that gets the share.
    pub version_arn: StateMachineArn,
    /// Percent.
    pub weight: u64,
}

/// A name for one version, or for two with weights.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Alias {
    /// `<machine>:<name>`.
    pub arn: StateMachineArn,
    /// The machine it belongs to.
    pub machine_arn: StateMachineArn,
    /// Unique in its machine.
    pub name: String,
    /// The alias's description.
    pub description: Option<String>,
    /// One route or two; the weights sum up to 100.
    pub routes: Vec<Route>,
    /// When it was created.
    pub created: i64,
    /// When it last changed.
    pub updated: i64,
    /// Position in the order of creation, newest highest (dates may be equal).
    pub order: u64,
}

/// A task that workers outside poll for.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Activity {
    /// Its ARN.
    pub arn: ActivityArn,
    /// Unique in its account and region.
    pub name: String,
    /// When it was created.
    pub created: i64,
    /// The encryption of its tasks' data.
    pub encryption: EncryptionConfiguration,
    /// Tags by key.
    pub tags: BTreeMap<String, String>,
}

/// One thing in the catalog.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Record {
    /// A state machine.
    Machine(Box<MachineRecord>),
    /// A version.
    Version(Box<Version>),
    /// An alias.
    Alias(Alias),
    /// An activity.
    Activity(Activity),
    /// The state machine with this ARN was deleted. Kept until the reconciler of Workflow objects has seen it: a machine
    /// that is neither here nor said to be deleted was lost, with the file or with an older copy of it.
    Deleted(StateMachineArn),
}

impl Record {
    /// The ARN that identifies it.
    pub fn arn(&self) -> &str {
        match self {
            Record::Machine(machine) => machine.arn.as_str(),
            Record::Version(version) => version.arn.as_str(),
            Record::Alias(alias) => alias.arn.as_str(),
            Record::Activity(activity) => activity.arn.as_str(),
            Record::Deleted(arn) => arn.as_str(),
        }
    }
}

/// A change of the catalog.
#[derive(Clone, Debug)]
pub enum CatalogChange {
    /// Inserts a record, or replaces the one with the same ARN.
    Put(Record),
    /// Deletes the record with this ARN.
    Delete(String),
}

/// The catalog in memory.
#[derive(Default, Debug)]
pub struct CatalogState {
    machines: BTreeMap<StateMachineArn, Arc<MachineRecord>>,
    versions: BTreeMap<StateMachineArn, BTreeMap<u64, Arc<Version>>>,
    aliases: BTreeMap<StateMachineArn, BTreeMap<String, Arc<Alias>>>,
    activities: BTreeMap<ActivityArn, Arc<Activity>>,
    deleted: BTreeSet<StateMachineArn>,
}

impl CatalogState {
    /// The machine with this unqualified ARN.
    pub fn machine(&self, arn: &StateMachineArn) -> Option<&Arc<MachineRecord>> {
        self.machines.get(arn)
    }

    /// Machines whose ARN has the prefix, by name.
    pub fn machines(&self, prefix: &str) -> impl Iterator<Item = &Arc<MachineRecord>> {
        within(&self.machines, prefix)
    }

    /// Whether the machine with this unqualified ARN was deleted and its deletion is still recorded.
    pub fn is_deleted(&self, arn: &StateMachineArn) -> bool {
        self.deleted.contains(arn)
    }

    /// ARNs of machines that were deleted and are still remembered.
    pub fn deleted(&self) -> impl Iterator<Item = &StateMachineArn> {
        self.deleted.iter()
    }

    /// A machine's version.
    pub fn version(&self, machine_arn: &StateMachineArn, number: u64) -> Option<&Arc<Version>> {
        self.versions.get(machine_arn)?.get(&number)
    }

    /// A machine's versions, oldest first.
    pub fn versions(&self, machine_arn: &StateMachineArn) -> impl DoubleEndedIterator<Item = &Arc<Version>> {
        self.versions.get(machine_arn).into_iter().flat_map(BTreeMap::values)
    }

    /// A machine's alias.
    pub fn alias(&self, machine_arn: &StateMachineArn, name: &str) -> Option<&Arc<Alias>> {
        self.aliases.get(machine_arn)?.get(name)
    }

    /// A machine's aliases, by name.
    pub fn aliases(&self, machine_arn: &StateMachineArn) -> impl Iterator<Item = &Arc<Alias>> {
        self.aliases.get(machine_arn).into_iter().flat_map(BTreeMap::values)
    }

    /// The activity with this ARN.
    pub fn activity(&self, arn: &ActivityArn) -> Option<&Arc<Activity>> {
        self.activities.get(arn)
    }

    /// Activities whose ARN has the prefix, by name.
    pub fn activities(&self, prefix: &str) -> impl Iterator<Item = &Arc<Activity>> {
        within(&self.activities, prefix)
    }

    /// Applies a change.
    pub(crate) fn apply(&mut self, change: CatalogChange) {
        match change {
            CatalogChange::Put(Record::Machine(machine)) => {
                self.deleted.remove(&machine.arn);
                self.machines.insert(machine.arn.clone(), Arc::from(machine));
            }
            CatalogChange::Put(Record::Version(version)) => {
                let versions = self.versions.entry(version.machine_arn.clone()).or_default();
                versions.insert(version.number, Arc::from(version));
            }
            CatalogChange::Put(Record::Alias(alias)) => {
                let aliases = self.aliases.entry(alias.machine_arn.clone()).or_default();
                aliases.insert(alias.name.clone(), Arc::new(alias));
            }
            CatalogChange::Put(Record::Activity(activity)) => {
                self.activities.insert(activity.arn.clone(), Arc::new(activity));
            }
            CatalogChange::Put(Record::Deleted(arn)) => {
                self.machines.remove(&arn);
                self.deleted.insert(arn);
            }
            CatalogChange::Delete(arn) => self.delete(&arn),
        }
    }

    fn delete(&mut self, arn: &str) {
        if self.deleted.remove(arn) || self.activities.remove(arn).is_some() {
            return;
        }
        let Some((machine_arn, qualifier)) = arn.rsplit_once(':') else { return };
        match qualifier.parse::<u64>() {
            Ok(number) => drop(self.versions.get_mut(machine_arn).and_then(|all| all.remove(&number))),
            Err(_) => drop(self.aliases.get_mut(machine_arn).and_then(|all| all.remove(qualifier))),
        }
    }
}

fn within<'a, K: Borrow<str> + Ord, T>(
    all: &'a BTreeMap<K, Arc<T>>,
    prefix: &str,
) -> impl Iterator<Item = &'a Arc<T>> {
    let prefix = prefix.to_owned();
    all.range::<str, _>((Bound::Included(&*prefix), Bound::Unbounded))
        .take_while(move |(arn, _)| (*arn).borrow().starts_with(&prefix))
        .map(|(_, record)| record)
}
