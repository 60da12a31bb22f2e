//! The catalog: what was acknowledged is there again, and what may not be is refused.

use mayfly_workflows_engine::catalog::{
    Catalog, CatalogRejection, CatalogState, EncryptionConfiguration, LoggingConfiguration, MachineRevision,
    NewActivity, NewAlias, NewMachine, Publication, Route, TracingConfiguration, UpdateMachine,
};
use mayfly_workflows_language::arn::{ActivityArn, StateMachineArn};
use mayfly_workflows_language::definition::StateMachineType;

const ARN: &str = "arn:aws:states:us-east-1:000000000000:stateMachine:m";

fn arn() -> StateMachineArn {
    StateMachineArn::from_trusted(ARN)
}

fn revision(definition: &str) -> MachineRevision {
    let (logging, tracing) = (LoggingConfiguration::default(), TracingConfiguration::default());
    let encryption = EncryptionConfiguration::default();
    MachineRevision::new(definition, "arn:aws:iam::0:role/r", logging, tracing, encryption, 1)
}

fn new(definition: &str, publish: bool) -> NewMachine {
    NewMachine {
        arn: arn(),
        name: "m".into(),
        kind: StateMachineType::Standard,
        revision: revision(definition),
        publish: publish.then(Publication::default),
        tags: [("k".to_owned(), "v".to_owned())].into(),
    }
}

fn update(definition: &str, id: &str, publish: bool) -> UpdateMachine {
    UpdateMachine {
        expects: None,
        arn: arn(),
        definition: Some(definition.into()),
        role_arn: None,
        logging: None,
        tracing: None,
        encryption: None,
        revision_id: id.into(),
        publish: publish.then(Publication::default),
        now: 2,
    }
}

fn alias(weights: &[(u64, u64)]) -> NewAlias {
    let route =
        |(version, weight): &(u64, u64)| Route { version_arn: arn().qualified(version), weight: *weight };
    NewAlias {
        machine_arn: arn(),
        name: "live".into(),
        description: None,
        routes: weights.iter().map(route).collect(),
        now: 3,
    }
}

fn delete(catalog: &Catalog, still_running: bool) {
    let seen = catalog.read().machine(&arn()).cloned().expect("there");
    let deleted =
        catalog.change(|book: &CatalogState| book.plan_delete(&seen, still_running)).expect("deletes");
    assert!(deleted, "as it was seen");
}

fn shape(book: &CatalogState) -> String {
    let machine = book.machine(&arn()).map(|machine| {
        (
            machine.revision.definition.to_string(),
            machine.revision.id.clone(),
            machine.next_version,
            machine.tags.clone(),
        )
    });
    let versions: Vec<_> = book.versions(&arn()).map(|version| version.arn.clone()).collect();
    let aliases: Vec<_> =
        book.aliases(&arn()).map(|alias| (alias.name.clone(), alias.routes.clone())).collect();
    let activities: Vec<_> = book.activities("arn:").map(|activity| activity.arn.clone()).collect();
    format!("{machine:?} {versions:?} {aliases:?} {activities:?}")
}

#[test]
fn what_was_acknowledged_is_there_after_reopening() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("catalog.db");
    let catalog = Catalog::open(Some(&path)).expect("opens");
    catalog.change(|book| book.plan_create(new("a", true))).expect("creates");
    catalog.change(|book| book.plan_update(update("b", "r1", true))).expect("updates");
    catalog.change(|book| book.plan_create_alias(alias(&[(1, 40), (2, 60)]))).expect("aliases");
    let activity = NewActivity {
        arn: ActivityArn::from_trusted("arn:aws:states:us-east-1:000000000000:activity:a"),
        name: "a".into(),
        encryption: EncryptionConfiguration::default(),
        tags: Default::default(),
        now: 4,
    };
    catalog.change(|book| book.plan_create_activity(activity)).expect("creates");
    catalog
        .change(|book| book.plan_tags(&arn().into(), |tags| drop(tags.insert("l".into(), "w".into()))))
        .expect("tags");
    let before = shape(&catalog.read());
    // Nothing is closed or flushed first: this is what a killed process leaves.
    std::mem::forget(catalog);
    let again = Catalog::open(Some(&path)).expect("opens again");
    assert_eq!(shape(&again.read()), before);
    delete(&again, false);
    let third = Catalog::open(Some(&path)).expect("opens a third time");
    assert!(third.read().machine(&arn()).is_none() && third.read().versions(&arn()).next().is_none());
}

#[test]
fn creating_is_idempotent_and_names_are_unique() {
    let catalog = Catalog::open(None).expect("opens");
    catalog.change(|book| book.plan_create(new("a", false))).expect("creates");
    let mut same = new("a", false);
    same.revision.role_arn = "arn:aws:iam::0:role/other".into();
    let (machine, _) = catalog.change(|book| book.plan_create(same)).expect("the role does not count");
    assert_eq!(machine.revision.role_arn, "arn:aws:iam::0:role/r");
    for other in
        [new("b", false), new("a", true), NewMachine { kind: StateMachineType::Express, ..new("a", false) }]
    {
        let refused = catalog.change(|book| book.plan_create(other)).expect_err("exists");
        assert!(matches!(refused, CatalogRejection::MachineExists(_)), "{refused}");
    }
}

#[test]
fn creating_is_idempotent_after_reopening() {
    let described = Publication { description: Some("first".into()) };
    for publish in [None, Some(Publication::default()), Some(described)] {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("catalog.db");
        let create = |publish: &Option<Publication>| {
            let catalog = Catalog::open(Some(&path)).expect("opens");
            catalog
                .change(|book| book.plan_create(NewMachine { publish: publish.clone(), ..new("a", false) }))
        };
        create(&publish).expect("creates");
        let (_, version) = create(&publish).expect("the same again");
        assert_eq!(version.is_some(), publish.is_some());
        let other = Some(Publication { description: Some("other".into()) });
        assert!(matches!(create(&other), Err(CatalogRejection::MachineExists(_))));
    }
}

#[test]
fn a_publication_is_read_as_older_records_have_it() {
    let read = |text: &str| serde_json::from_str::<Option<Publication>>(text).expect("reads");
    assert_eq!(read("null"), None);
    assert_eq!(read("\"first\""), Some(Publication { description: Some("first".into()) }));
    assert_eq!(read("{\"description\":null}"), Some(Publication::default()));
}

#[test]
fn versions_are_revisions_and_numbers_are_not_given_twice() {
    let catalog = Catalog::open(None).expect("opens");
    catalog.change(|book| book.plan_create(new("a", true))).expect("creates");
    let publish = |revision: Option<&'static str>| {
        let planned = catalog.change(|book| book.plan_publish(&arn(), revision, None, 5));
        planned.map(|(_, version)| version.expect("a version").number)
    };
    assert_eq!(publish(None).expect("published"), 1);
    let (machine, _) = catalog.change(|book| book.plan_update(update("a", "r1", false))).expect("updates");
    assert_eq!(machine.revision.id, None, "nothing changed, so nothing is new");
    catalog.change(|book| book.plan_update(update("b", "r2", false))).expect("updates");
    assert!(matches!(publish(Some("INITIAL")), Err(CatalogRejection::StaleRevision { .. })));
    assert_eq!(publish(Some("r2")).expect("published"), 2);
    catalog.change(|book| book.plan_delete_version(&arn(), 2)).expect("deletes");
    catalog.change(|book| book.plan_delete_version(&arn(), 2)).expect("is gone");
    assert_eq!(publish(None).expect("published"), 3);
}

#[test]
fn aliases_route_to_versions_that_are_there() {
    let catalog = Catalog::open(None).expect("opens");
    catalog.change(|book| book.plan_create(new("a", true))).expect("creates");
    let create = |new| catalog.change(|book: &CatalogState| book.plan_create_alias(new));
    assert!(matches!(create(alias(&[(2, 100)])), Err(CatalogRejection::ResourceMissing(_))));
    create(alias(&[(1, 100)])).expect("creates");
    create(alias(&[(1, 100)])).expect("the same again");
    catalog.change(|book| book.plan_update(update("b", "r1", true))).expect("updates");
    assert!(matches!(create(alias(&[(2, 100)])), Err(CatalogRejection::AliasExists(_))));
    let refused = catalog.change(|book| book.plan_delete_version(&arn(), 1)).expect_err("referenced");
    assert!(matches!(refused, CatalogRejection::VersionReferenced(names) if names == ["live"]));
}

#[test]
fn a_machine_with_running_executions_goes_later() {
    let catalog = Catalog::open(None).expect("opens");
    catalog.change(|book| book.plan_create(new("a", false))).expect("creates");
    delete(&catalog, true);
    assert!(catalog.read().machine(&arn()).is_some_and(|machine| machine.deleting));
    let refused = catalog.change(|book| book.plan_create(new("a", false))).expect_err("not yet");
    assert!(matches!(refused, CatalogRejection::MachineDeleting(_)));
    delete(&catalog, false);
    assert!(catalog.read().machine(&arn()).is_none());
}

#[test]
fn who_finishes_a_deletion_late_leaves_the_next_machine_alone() {
    let catalog = Catalog::open(None).expect("opens");
    catalog.change(|book| book.plan_create(new("a", false))).expect("creates");
    delete(&catalog, true);
    // Two look at it; one finishes, and the name is given again before the other comes to it.
    let seen = catalog.read().machine(&arn()).cloned().expect("there");
    delete(&catalog, false);
    catalog.change(|book| book.plan_create(new("b", true))).expect("creates");
    let before = shape(&catalog.read());
    let deleted =
        catalog.change(|book: &CatalogState| book.plan_delete(&seen, false)).expect("nothing to do");
    assert!(!deleted && shape(&catalog.read()) == before);
}

#[test]
fn a_resource_has_fifty_tags_at_most() {
    let catalog = Catalog::open(None).expect("opens");
    catalog.change(|book| book.plan_create(new("a", false))).expect("creates");
    let add = |count: usize| {
        catalog.change(|book: &CatalogState| {
            book.plan_tags(&arn().into(), |tags| {
                tags.extend((0..count).map(|n| (format!("t{n}"), String::new())))
            })
        })
    };
    add(49).expect("fifty with the first");
    assert!(matches!(add(50), Err(CatalogRejection::TooManyTags(_))));
}
