//! Decisions about creations, changes and deletions: pure functions from the catalog's content to the changes.

use mayfly_workflows_language::arn::{ActivityArn, ArnQualifier, StateMachineArn, TaggedArn};
use mayfly_workflows_language::definition::StateMachineType;
use std::collections::BTreeMap;
use std::sync::Arc;

use super::configuration::{EncryptionConfiguration, LoggingConfiguration, TracingConfiguration};
use super::record::{
    Activity, Alias, CatalogChange, CatalogState, MachineRecord, MachineRevision, Publication, Record, Route,
    Version,
};
use super::store::CatalogError;

/// Reasons for which the catalog rejects a change.
#[derive(Debug, thiserror::Error)]
pub enum CatalogRejection {
    /// The state machine does not exist.
    #[error("no state machine {0}")]
    MachineMissing(StateMachineArn),
    /// The state machine is being deleted.
    #[error("state machine {0} is being deleted")]
    MachineDeleting(StateMachineArn),
    /// A state machine of this name exists with a different definition or configuration.
    #[error("state machine {0} exists")]
    MachineExists(StateMachineArn),
    /// The name is taken by an activity that is encrypted otherwise.
    #[error("activity {0} exists")]
    ActivityExists(ActivityArn),
    /// The alias or version does not exist.
    #[error("no such resource: {0}")]
    ResourceMissing(StateMachineArn),
    /// No resource that can have tags has this ARN.
    #[error("nothing to tag: {0}")]
    TaggedMissing(TaggedArn),
    /// The revision that the request names is not the newest.
    #[error("revision {asked} is not {current}")]
    StaleRevision {
        /// The revision that the request names as the current one.
        asked: String,
        /// The current revision.
        current: String,
    },
    /// An alias of the same name with other routes.
    #[error("alias {0} exists")]
    AliasExists(StateMachineArn),
    /// Aliases still send traffic to the version.
    #[error("version is referenced by {0:?}")]
    VersionReferenced(Vec<String>),
    /// More tags than a resource may have.
    #[error("too many tags on {0}")]
    TooManyTags(TaggedArn),
    /// The catalog's file cannot be read or written.
    #[error(transparent)]
    Store(#[from] CatalogError),
}

/// AWS's limit.
pub(crate) const TAGS_MAX: usize = 50;

/// A machine to create.
#[derive(Debug)]
pub struct NewMachine {
    /// The unqualified ARN.
    pub arn: StateMachineArn,
    /// Its name.
    pub name: String,
    /// STANDARD or EXPRESS.
    pub kind: StateMachineType,
    /// The first revision.
    pub revision: MachineRevision,
    /// Publishes it as version 1.
    pub publish: Option<Publication>,
    /// Tags.
    pub tags: BTreeMap<String, String>,
}

/// The changes of a machine.
#[derive(Debug)]
pub struct UpdateMachine {
    /// The machine.
    pub arn: StateMachineArn,
    /// Each field that is present replaces the machine's.
    pub definition: Option<Arc<str>>,
    /// See `definition`.
    pub role_arn: Option<String>,
    /// See `definition`.
    pub logging: Option<LoggingConfiguration>,
    /// See `definition`.
    pub tracing: Option<TracingConfiguration>,
    /// See `definition`.
    pub encryption: Option<EncryptionConfiguration>,
    /// The id of the revision that this makes, if it makes one.
    pub revision_id: String,
    /// Publishes what comes of it.
    pub publish: Option<Publication>,
    /// Refuses the update where the machine is another one by now.
    pub expects: Option<SeenRevision>,
    /// Now, in milliseconds.
    pub now: i64,
}

/// A machine's revision, as it was read before an update that depends on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeenRevision {
    /// When the machine was created: a machine of the same name with a later time is another machine.
    pub created: i64,
    /// The revision's id; `INITIAL` for the one that CreateStateMachine made.
    pub revision: String,
}

impl SeenRevision {
    /// The revision that a machine has now.
    pub fn of(machine: &MachineRecord) -> Self {
        let revision = machine.revision.id.clone().unwrap_or_else(|| "INITIAL".to_owned());
        Self { created: machine.created, revision }
    }
}

/// An alias to create.
#[derive(Debug)]
pub struct NewAlias {
    /// The machine of the routed versions.
    pub machine_arn: StateMachineArn,
    /// The alias's name.
    pub name: String,
    /// The alias's description.
    pub description: Option<String>,
    /// Checked routes.
    pub routes: Vec<Route>,
    /// Now, in milliseconds.
    pub now: i64,
}

/// The changes of an alias.
#[derive(Debug)]
pub struct UpdateAlias {
    /// The alias's machine.
    pub machine_arn: StateMachineArn,
    /// The alias's name.
    pub name: String,
    /// Replaces the description if named.
    pub description: Option<String>,
    /// Replaces the routes if named.
    pub routes: Option<Vec<Route>>,
    /// Now, in milliseconds.
    pub now: i64,
}

/// An activity to create.
#[derive(Debug)]
pub struct NewActivity {
    /// Its ARN.
    pub arn: ActivityArn,
    /// Its name.
    pub name: String,
    /// The encryption of its tasks' data.
    pub encryption: EncryptionConfiguration,
    /// Tags.
    pub tags: BTreeMap<String, String>,
    /// Now, in milliseconds.
    pub now: i64,
}

/// A machine, and the version that was published with it.
pub type Created = (Arc<MachineRecord>, Option<Arc<Version>>);

type Planned<T> = Result<(Vec<CatalogChange>, T), CatalogRejection>;

impl CatalogState {
    /// The machine, unless it is missing or being deleted.
    pub fn live(&self, arn: &StateMachineArn) -> Result<&Arc<MachineRecord>, CatalogRejection> {
        let machine = self.machine(arn).ok_or_else(|| CatalogRejection::MachineMissing(arn.clone()))?;
        if machine.deleting { Err(CatalogRejection::MachineDeleting(arn.clone())) } else { Ok(machine) }
    }

    /// CreateStateMachine. An equal request returns the machine that the first one created; role and tags are not
    /// compared (API reference, CreateStateMachine).
    pub fn plan_create(&self, new: NewMachine) -> Planned<Created> {
        if let Some(machine) = self.machine(&new.arn) {
            if machine.deleting {
                return Err(CatalogRejection::MachineDeleting(new.arn));
            }
            let mut comparable = new.revision.clone();
            comparable.role_arn.clone_from(&machine.revision.role_arn);
            let same = machine.kind == new.kind
                && machine.revision.has_same_content(&comparable)
                && machine.published_at_creation == new.publish;
            return if same {
                let version = new.publish.and_then(|_| self.version(&new.arn, 1).cloned());
                Ok((Vec::new(), (Arc::clone(machine), version)))
            } else {
                Err(CatalogRejection::MachineExists(new.arn))
            };
        }
        if new.tags.len() > TAGS_MAX {
            return Err(CatalogRejection::TooManyTags(new.arn.into()));
        }
        let mut machine = MachineRecord {
            arn: new.arn,
            name: new.name,
            kind: new.kind,
            created: new.revision.updated,
            revision: new.revision,
            next_version: 1,
            deleting: false,
            published_at_creation: new.publish.clone(),
            tags: new.tags,
        };
        let now = machine.created;
        let version = new.publish.map(|publication| machine.publish(publication.description, now));
        Ok(changed(machine, version))
    }

    /// UpdateStateMachine: a new revision where something differs, a version where one is wanted.
    pub fn plan_update(&self, update: UpdateMachine) -> Planned<Created> {
        let mut machine = MachineRecord::clone(self.live(&update.arn)?);
        let current = SeenRevision::of(&machine);
        if let Some(expected) = update.expects.filter(|expected| *expected != current) {
            return Err(CatalogRejection::StaleRevision {
                asked: expected.revision,
                current: current.revision,
            });
        }
        let mut revision = MachineRevision {
            id: Some(update.revision_id),
            definition: update.definition.unwrap_or_else(|| Arc::clone(&machine.revision.definition)),
            role_arn: update.role_arn.unwrap_or_else(|| machine.revision.role_arn.clone()),
            logging: update.logging.unwrap_or_else(|| machine.revision.logging.clone()),
            tracing: update.tracing.unwrap_or(machine.revision.tracing),
            encryption: update.encryption.unwrap_or_else(|| machine.revision.encryption.clone()),
            updated: update.now,
            compiled: Default::default(),
        };
        if !revision.has_same_content(&machine.revision) {
            std::mem::swap(&mut machine.revision, &mut revision);
        }
        match update.publish {
            Some(publication) => Ok(self.publish(machine, publication.description, update.now)),
            None => Ok(changed(machine, None)),
        }
    }

    /// PublishStateMachineVersion: the newest revision becomes a version, unless it is one already.
    pub fn plan_publish(
        &self,
        arn: &StateMachineArn,
        revision_id: Option<&str>,
        description: Option<String>,
        now: i64,
    ) -> Planned<Created> {
        let machine = MachineRecord::clone(self.live(arn)?);
        let current = machine.revision.id.as_deref().unwrap_or("INITIAL");
        match revision_id {
            Some(asked) if asked != current => {
                Err(CatalogRejection::StaleRevision { asked: asked.to_owned(), current: current.to_owned() })
            }
            _ => Ok(self.publish(machine, description, now)),
        }
    }

    fn publish(
        &self,
        mut machine: MachineRecord,
        description: Option<String>,
        now: i64,
    ) -> (Vec<CatalogChange>, Created) {
        let published = self.versions(&machine.arn).next_back();
        match published.filter(|version| version.revision.id == machine.revision.id) {
            Some(version) => (Vec::new(), (Arc::new(machine), Some(Arc::clone(version)))),
            None => {
                let version = machine.publish(description, now);
                changed(machine, Some(version))
            }
        }
    }

    /// DeleteStateMachine: at once with its versions and aliases, or after its last execution. Only as it was
    /// `seen` when its executions were looked for: `false` when it is gone, changed or another one since.
    pub fn plan_delete(&self, seen: &Arc<MachineRecord>, still_running: bool) -> Planned<bool> {
        let arn = &seen.arn;
        if !self.machine(arn).is_some_and(|there| Arc::ptr_eq(there, seen)) {
            return Ok((Vec::new(), false));
        }
        if still_running {
            let machine = MachineRecord { deleting: true, ..MachineRecord::clone(seen) };
            return Ok((vec![CatalogChange::Put(Record::Machine(Box::new(machine)))], true));
        }
        let versions = self.versions(arn).map(|version| version.arn.to_string());
        let aliases = self.aliases(arn).map(|alias| alias.arn.to_string());
        let gone = versions.chain(aliases).map(CatalogChange::Delete);
        Ok((gone.chain([CatalogChange::Put(Record::Deleted(arn.clone()))]).collect(), true))
    }

    /// The reconciler of Workflow objects has seen that this machine was deleted.
    pub fn plan_forget_deleted(&self, arn: &StateMachineArn) -> Planned<()> {
        let known = self.is_deleted(arn).then(|| CatalogChange::Delete(arn.to_string()));
        Ok((known.into_iter().collect(), ()))
    }

    /// DeleteStateMachineVersion: rejected while an alias routes to the version. No change for a version that does not
    /// exist.
    pub fn plan_delete_version(&self, machine_arn: &StateMachineArn, number: u64) -> Planned<()> {
        let Some(version) = self.version(machine_arn, number) else { return Ok((Vec::new(), ())) };
        let routed = |alias: &&Arc<Alias>| alias.routes.iter().any(|route| route.version_arn == version.arn);
        let names: Vec<String> = self.aliases(machine_arn).filter(routed).map(|a| a.name.clone()).collect();
        if names.is_empty() {
            Ok((vec![CatalogChange::Delete(version.arn.to_string())], ()))
        } else {
            Err(CatalogRejection::VersionReferenced(names))
        }
    }

    /// CreateStateMachineAlias: idempotent for equal name, description and routes.
    pub fn plan_create_alias(&self, new: NewAlias) -> Planned<Arc<Alias>> {
        self.live(&new.machine_arn)?;
        self.check_routes(&new.routes)?;
        if let Some(alias) = self.alias(&new.machine_arn, &new.name) {
            return if alias.routes == new.routes && alias.description == new.description {
                Ok((Vec::new(), Arc::clone(alias)))
            } else {
                Err(CatalogRejection::AliasExists(alias.arn.clone()))
            };
        }
        let newest = self.aliases(&new.machine_arn).map(|alias| alias.order).max();
        let alias = Alias {
            arn: new.machine_arn.qualified(&new.name),
            machine_arn: new.machine_arn,
            name: new.name,
            description: new.description,
            routes: new.routes,
            created: new.now,
            updated: new.now,
            order: newest.map_or(0, |order| order + 1),
        };
        Ok((vec![CatalogChange::Put(Record::Alias(alias.clone()))], Arc::new(alias)))
    }

    /// UpdateStateMachineAlias.
    pub fn plan_update_alias(&self, update: UpdateAlias) -> Planned<i64> {
        let missing = || CatalogRejection::ResourceMissing(update.machine_arn.qualified(&update.name));
        let mut alias = Alias::clone(self.alias(&update.machine_arn, &update.name).ok_or_else(missing)?);
        if let Some(routes) = update.routes {
            self.check_routes(&routes)?;
            alias.routes = routes;
        }
        alias.description = update.description.or(alias.description);
        alias.updated = update.now;
        Ok((vec![CatalogChange::Put(Record::Alias(alias))], update.now))
    }

    /// DeleteStateMachineAlias. No change for an alias that does not exist.
    pub fn plan_delete_alias(&self, machine_arn: &StateMachineArn, name: &str) -> Planned<()> {
        let alias = self.alias(machine_arn, name);
        Ok((alias.map(|alias| CatalogChange::Delete(alias.arn.to_string())).into_iter().collect(), ()))
    }

    fn check_routes(&self, routes: &[Route]) -> Result<(), CatalogRejection> {
        let there = |route: &Route| match route.version_arn.qualifier()? {
            ArnQualifier::Version(number) => self.version(&route.version_arn.unqualified(), number),
            ArnQualifier::Alias(_) => None,
        };
        match routes.iter().find(|route| there(route).is_none()) {
            Some(route) => Err(CatalogRejection::ResourceMissing(route.version_arn.clone())),
            None => Ok(()),
        }
    }

    /// CreateActivity: an equal name returns the existing activity.
    pub fn plan_create_activity(&self, new: NewActivity) -> Planned<Arc<Activity>> {
        if let Some(activity) = self.activity(&new.arn) {
            return if activity.encryption == new.encryption {
                Ok((Vec::new(), Arc::clone(activity)))
            } else {
                Err(CatalogRejection::ActivityExists(new.arn))
            };
        }
        if new.tags.len() > TAGS_MAX {
            return Err(CatalogRejection::TooManyTags(new.arn.into()));
        }
        let NewActivity { arn, name, encryption, tags, now } = new;
        let activity = Activity { arn, name, created: now, encryption, tags };
        Ok((vec![CatalogChange::Put(Record::Activity(activity.clone()))], Arc::new(activity)))
    }

    /// DeleteActivity. No change for an activity that does not exist.
    pub fn plan_delete_activity(&self, arn: &ActivityArn) -> Planned<()> {
        Ok((self.activity(arn).map(|_| CatalogChange::Delete(arn.to_string())).into_iter().collect(), ()))
    }

    /// The tags of a machine or an activity.
    pub fn tags(&self, arn: &TaggedArn) -> Result<&BTreeMap<String, String>, CatalogRejection> {
        let tags = match arn {
            TaggedArn::StateMachine(arn) => self.machine(arn).map(|machine| &machine.tags),
            TaggedArn::Activity(arn) => self.activity(arn).map(|activity| &activity.tags),
        };
        tags.ok_or_else(|| CatalogRejection::TaggedMissing(arn.clone()))
    }

    /// TagResource and UntagResource: `change` edits the tags.
    pub fn plan_tags(
        &self,
        arn: &TaggedArn,
        change: impl FnOnce(&mut BTreeMap<String, String>),
    ) -> Planned<()> {
        let mut tags = self.tags(arn)?.clone();
        change(&mut tags);
        if tags.len() > TAGS_MAX {
            return Err(CatalogRejection::TooManyTags(arn.clone()));
        }
        let record = match arn {
            TaggedArn::StateMachine(arn) => self
                .machine(arn)
                .map(|machine| MachineRecord { tags, ..MachineRecord::clone(machine) })
                .map(|machine| Record::Machine(Box::new(machine))),
            TaggedArn::Activity(arn) => self
                .activity(arn)
                .map(|activity| Record::Activity(Activity { tags, ..Activity::clone(activity) })),
        };
        let record = record.ok_or_else(|| CatalogRejection::TaggedMissing(arn.clone()))?;
        Ok((vec![CatalogChange::Put(record)], ()))
    }
}

impl MachineRecord {
    /// Makes the next version of the current revision.
    fn publish(&mut self, description: Option<String>, now: i64) -> Version {
        let number = self.next_version;
        self.next_version += 1;
        Version {
            arn: self.arn.qualified(number),
            machine_arn: self.arn.clone(),
            number,
            description,
            created: now,
            revision: self.revision.clone(),
        }
    }
}

fn changed(machine: MachineRecord, version: Option<Version>) -> (Vec<CatalogChange>, Created) {
    let mut changes = vec![CatalogChange::Put(Record::Machine(Box::new(machine.clone())))];
    changes.extend(version.clone().map(|version| CatalogChange::Put(Record::Version(Box::new(version)))));
    (changes, (Arc::new(machine), version.map(Arc::new)))
}
