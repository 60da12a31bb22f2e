//! The conformance suite of all stores of the catalog.

use std::collections::BTreeMap;

use mayfly_workflows_language::{
    arn::{ActivityArn, StateMachineArn},
    definition::StateMachineType,
};
use serde_json::Value;

use super::*;
use crate::catalog::{
    configuration::{EncryptionConfiguration, LoggingConfiguration, TracingConfiguration},
    record::{Activity, Alias, MachineRecord, MachineRevision, Publication, Route, Version},
};

fn machine_arn(name: &str) -> StateMachineArn {
    StateMachineArn::from_trusted(format!("arn:stateMachine:{name}"))
}

fn revision(definition: &str) -> MachineRevision {
    let (logging, tracing) = (LoggingConfiguration::default(), TracingConfiguration::default());
    MachineRevision::new(definition, "arn:role", logging, tracing, EncryptionConfiguration::default(), 1)
}

fn machine(name: &str, definition: &str) -> Record {
    Record::Machine(Box::new(MachineRecord {
        arn: machine_arn(name),
        name: name.to_owned(),
        kind: StateMachineType::Express,
        created: 1,
        revision: revision(definition),
        next_version: 2,
        deleting: false,
        published_at_creation: Some(Publication::default()),
        tags: [("k".to_owned(), "ü \" ' ;".to_owned())].into(),
    }))
}

fn version(name: &str, number: u64) -> Record {
    Record::Version(Box::new(Version {
        arn: machine_arn(name).qualified(number),
        machine_arn: machine_arn(name),
        number,
        description: Some("first".into()),
        created: 2,
        revision: revision("{}"),
    }))
}

fn alias(name: &str, alias: &str) -> Record {
    Record::Alias(Alias {
        arn: machine_arn(name).qualified(alias),
        machine_arn: machine_arn(name),
        name: alias.to_owned(),
        description: None,
        routes: vec![Route { version_arn: machine_arn(name).qualified(1), weight: 100 }],
        created: 3,
        updated: 4,
        order: 1,
    })
}

fn activity(name: &str) -> Record {
    Record::Activity(Activity {
        arn: ActivityArn::from_trusted(format!("arn:activity:{name}")),
        name: name.to_owned(),
        created: 5,
        encryption: EncryptionConfiguration::default(),
        tags: BTreeMap::new(),
    })
}

fn put(record: &Record) -> CatalogChange {
    CatalogChange::Put(record.clone())
}

fn delete(record: &Record) -> CatalogChange {
    CatalogChange::Delete(record.arn().to_owned())
}

/// Records by ARN; a record that is stored twice fails the test.
fn by_arn<'a>(records: impl IntoIterator<Item = &'a Record>) -> BTreeMap<String, Value> {
    let mut found = BTreeMap::new();
    for record in records {
        let before = found.insert(record.arn().to_owned(), serde_json::to_value(record).expect("plain"));
        assert_eq!(before, None, "{} is there twice", record.arn());
    }
    found
}

#[track_caller]
fn check(store: &dyn CatalogStore, expect: &[&Record]) {
    assert_eq!(by_arn(&store.load().expect("read")), by_arn(expect.iter().copied()));
}

/// Leaves one machine, with this definition, and an activity.
fn conformance(store: &mut dyn CatalogStore) -> [Record; 2] {
    check(store, &[]);
    store.write(&[]).expect("written");
    store.in_place().expect("nobody removed it");
    let all = [machine("m", "{}"), version("m", 1), alias("m", "live"), activity("a")];
    store.write(&all.each_ref().map(put)).expect("written");
    let [first, version, alias, activity] = &all;
    check(store, &[first, version, alias, activity]);

    // A record replaces the one with the same ARN, also one of another kind.
    let (second, deleted) = (machine("m", "{\"Comment\": 1}"), Record::Deleted(machine_arn("n")));
    store.write(&[put(&second), put(&machine("n", "{}")), put(&deleted)]).expect("written");
    check(store, &[&second, version, alias, activity, &deleted]);

    // In order, each with its own ARN only; the deletion of an absent record is none.
    let (again, gone) = (activity.clone(), machine("gone", "{}"));
    store.write(&[delete(activity), put(&again), put(&gone), delete(&gone), delete(&gone)]).expect("written");
    check(store, &[&second, version, alias, activity, &deleted]);
    store.write(&[delete(version), delete(alias), delete(&deleted)]).expect("written");
    check(store, &[&second, activity]);

    store.probe().expect("can be written");
    check(store, &[&second, activity]);
    [second, again]
}

#[test]
fn memory() {
    conformance(&mut MemoryCatalog::default());
}

#[test]
fn sqlite() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("catalog.db");
    let mut store = SqliteCatalog::open(&path).expect("opens");
    let [machine, activity] = conformance(&mut store);
    // Nothing is closed or flushed first, as after a kill.
    std::mem::forget(store);
    let store = SqliteCatalog::open(&path).expect("opens again");
    check(&store, &[&machine, &activity]);
    std::fs::remove_file(&path).expect("removed");
    store.in_place().expect_err("the file was removed");
}

#[test]
fn a_failed_write_of_sqlite_leaves_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut store = SqliteCatalog::open(&folder.path().join("catalog.db")).expect("opens");
    let (kept, next) = (activity("kept"), activity("next"));
    store.write(&[put(&kept)]).expect("written");
    let full = "CREATE TRIGGER full BEFORE INSERT ON catalog WHEN new.arn LIKE '%:full' \
                BEGIN SELECT RAISE(ABORT, 'is full'); END;";
    store.connection.execute_batch(full).expect("set");
    let failed = store.write(&[put(&next), delete(&kept), put(&activity("full"))]).expect_err("is full");
    assert!(failed.to_string().contains("is full"), "{failed}");
    check(&store, &[&kept]);
    store.write(&[put(&next)]).expect("written");
    check(&store, &[&kept, &next]);
}

#[test]
fn sqlite_that_is_read_only_fails_its_probe() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut store = SqliteCatalog::open(&folder.path().join("catalog.db")).expect("opens");
    let refuses = |store: &SqliteCatalog, on: bool| {
        store.connection.pragma_update(None, "query_only", on).expect("set");
    };
    refuses(&store, true);
    for failed in [store.probe(), store.write(&[put(&activity("a"))])] {
        let failed = failed.expect_err("nothing can be written").to_string();
        assert!(failed.contains("readonly"), "{failed}");
    }
    refuses(&store, false);
    store.probe().expect("can be written again");
    check(&store, &[]);
}
