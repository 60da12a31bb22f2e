//! The conformance suite of backends: the store over each of them, compared with the simplest possible model, which is
//! the complete state after every write.

use std::collections::{BTreeMap, BTreeSet};

use futures::FutureExt as _;
use mayfly_store::{
    BATCH_WRITES_MAX, Config, EventKind, Key, ListError, ListOptions, MemoryStorage, Range, Revision,
    SharedStorage, Store, Watch, WatchClosed, WatchError, Write, WriteError, WriteEvent,
};
use proptest::prelude::*;

/// Small, so that most runs exceed it.
const HISTORY_EVENTS_MAX: usize = 24;

#[derive(Clone, Debug)]
enum Step {
    Write(Vec<Change>),
    /// The same in one revision.
    Batch(Vec<Change>),
    /// A paged list: where, at which part of the past (0: now), page size, and a write between pages.
    List {
        range: usize,
        back: u64,
        limit: usize,
        between: Change,
    },
    /// A watch: of what, from which part of the past.
    Watch {
        range: usize,
        back: u64,
    },
    /// One of the watches takes some events.
    Drain {
        watch: prop::sample::Index,
        events: usize,
    },
    /// The store is closed and opened again.
    Reopen,
}

#[derive(Clone, Debug)]
struct Change {
    key: usize,
    kind: u8,
    /// 0: no condition; 1: the current revision; 2: another one.
    expected: u8,
}

type State = BTreeMap<Key, (String, Revision, Revision)>;

/// A write, as an event should report it.
#[derive(Clone, Debug, PartialEq)]
struct Told {
    revision: Revision,
    kind: EventKind,
    key: Key,
    value: String,
    created: Revision,
    previous: Option<(String, Revision)>,
}

#[derive(Default)]
struct Model {
    /// The states by revision. The numbers that a batch takes before its revision have the state before it.
    states: Vec<State>,
    events: Vec<Told>,
    /// The revision at which the store was opened: it has no history before it.
    opened: Revision,
}

impl Model {
    fn now(&self) -> &State {
        self.states.last().unwrap()
    }
    fn revision(&self) -> Revision {
        Revision(self.states.len() as u64 - 1)
    }
    fn back(&self, back: u64) -> Revision {
        Revision(self.revision().0.saturating_sub(back))
    }

    fn write(&mut self, writes: &[Write], one_revision: bool) -> Result<(), WriteError> {
        let keys: BTreeSet<_> = writes.iter().map(Write::key).collect();
        if one_revision && keys.len() < writes.len() {
            return Err(WriteError::BatchRejected { limit: BATCH_WRITES_MAX });
        }
        let before = self.revision().0;
        let last = Revision(before + writes.len() as u64);
        let (mut states, mut events) = (Vec::new(), Vec::new());
        let mut state = self.now().clone();
        for (number, write) in (before + 1..).map(Revision).zip(writes) {
            let revision = if one_revision { last } else { number };
            events.push(Self::write_one(&mut state, write, number, revision)?);
            let visible = revision == number;
            states.push(if visible { state.clone() } else { self.now().clone() });
        }
        self.states.extend(states);
        self.events.extend(events);
        Ok(())
    }

    fn write_one(
        state: &mut State,
        write: &Write,
        number: Revision,
        revision: Revision,
    ) -> Result<Told, WriteError> {
        let current = state.get(write.key()).cloned();
        let (kind, expected) = match write {
            Write::Create { .. } => (EventKind::Created, None),
            Write::Update { expected, .. } => (EventKind::Modified, *expected),
            Write::Delete { expected, .. } => (EventKind::Deleted, *expected),
        };
        match (&current, kind) {
            (Some(_), EventKind::Created) => return Err(WriteError::AlreadyExists),
            (None, EventKind::Modified | EventKind::Deleted) => return Err(WriteError::NotFound),
            (Some((_, _, current)), _) if expected.is_some_and(|expected| expected != *current) => {
                return Err(WriteError::Conflict { current: *current });
            }
            _ => {}
        }
        let created = current.as_ref().map_or(number, |(_, created, _)| *created);
        let value = match write {
            Write::Create { value, .. } | Write::Update { value, .. } => {
                let value = String::from_utf8(value.to_vec()).unwrap();
                state.insert(write.key().clone(), (value.clone(), created, revision));
                value
            }
            Write::Delete { key, .. } => state.remove(key).unwrap().0,
        };
        let previous = current.map(|(value, _, modified)| (value, modified));
        Ok(Told { revision, kind, key: write.key().clone(), value, created, previous })
    }

    /// The first event of a range from a position on, and the position after it.
    fn next_event(&self, range: &Range, from: usize) -> Option<(&Told, usize)> {
        let mut events = self.events.iter().enumerate().skip(from);
        let (at, event) = events.find(|(_, event)| range.contains(&event.key))?;
        Some((event, at + 1))
    }

    /// Whether the store may have dropped the events of a resource after a revision.
    fn may_have_forgotten(&self, resource: &str, after: Revision) -> bool {
        let events = self.events.iter().filter(|e| e.revision > after && &*e.key.resource == resource);
        after < self.opened || events.count() > HISTORY_EVENTS_MAX
    }
}

fn keys() -> Vec<Key> {
    let mut keys = Vec::new();
    for resource in ["configmaps", "pods"] {
        for namespace in ["", "a", "b"] {
            keys.extend(["x", "y", "z"].map(|name| Key::new(resource, namespace, name)));
        }
    }
    keys
}

fn ranges() -> Vec<Range> {
    let mut ranges = vec![
        Range::resource("pods"),
        Range::resource("configmaps"),
        Range::namespace("pods", "a"),
        Range::namespace("pods", ""),
        Range::namespace("configmaps", "nowhere"),
        Range::resource("unheard-of"),
    ];
    ranges.extend([0, 4, 17].map(|key| Range::key(&keys()[key])));
    ranges
}

fn to_write(model: &Model, change: &Change, count: usize) -> Write {
    let key = keys()[change.key].clone();
    let current = model.now().get(&key).map(|(_, _, modified)| *modified);
    let expected = match change.expected {
        0 => None,
        1 => Some(current.unwrap_or(Revision(1))),
        _ => Some(Revision(current.map_or(7, |current| current.0 - 1))),
    };
    let value = format!("value-{count}").into();
    match change.kind {
        // One that is accepted.
        5.. if current.is_none() => Write::Create { key, value },
        5.. => Write::Update { key, value, expected: current },
        0 => Write::Create { key, value },
        1..=3 => Write::Update { key, value, expected },
        4 => Write::Delete { key, expected },
    }
}

/// Opens a store over the storage of the run.
type Open<'a> = &'a dyn Fn(Config) -> Store;

struct Run<'a> {
    open: Open<'a>,
    store: Store,
    model: Model,
    watches: Vec<DrainedWatch>,
    writes: usize,
}

/// A watch, and how far it has been drained.
struct DrainedWatch {
    watch: Watch,
    range: Range,
    /// The revision of the last event, at first the one that it started after.
    seen: Revision,
    /// The position of the next one among the model's events.
    next: usize,
}

impl<'a> Run<'a> {
    fn start(open: Open<'a>) -> Self {
        let model = Model { states: vec![State::new()], ..Model::default() };
        Self { open, store: open(config()), model, watches: Vec::new(), writes: 0 }
    }

    async fn step(&mut self, step: Step) {
        match step {
            Step::Write(changes) => self.write(&changes, false).await,
            Step::Batch(changes) => self.write(&changes, true).await,
            Step::List { range, back, limit, between } => {
                self.list(&ranges()[range], back, limit, between).await
            }
            Step::Watch { range, back } => self.watch(ranges()[range].clone(), self.model.back(back)),
            Step::Drain { watch, events } => {
                if !self.watches.is_empty() {
                    let index = watch.index(self.watches.len());
                    self.drain(index, events);
                }
            }
            Step::Reopen => self.reopen().await,
        }
    }

    /// Everything that was acknowledged is there again. The watches of the closed store end.
    async fn reopen(&mut self) {
        for index in (0..self.watches.len()).rev() {
            self.drain(index, usize::MAX);
        }
        self.store.close().await;
        for drained in &mut self.watches {
            assert_eq!(drained.watch.next().await, Err(WatchClosed::Closed));
        }
        self.watches.clear();
        self.store = (self.open)(config());
        self.model.opened = self.model.revision();
        self.compare();
        assert_eq!(self.store.stats().objects, self.model.now().len());
    }

    async fn write(&mut self, changes: &[Change], one_revision: bool) {
        let mut planned = Vec::new();
        for change in changes {
            self.writes += 1;
            planned.push(to_write(&self.model, change, self.writes));
        }
        let expected = self.model.write(&planned, one_revision);
        let first = self.store.revision().0 + 1;
        let written = match one_revision {
            true => self.store.write_batch(planned.clone()).await,
            false => self.store.write_all(planned.clone()).await,
        };
        match (&written, &expected) {
            (Ok(written), Ok(())) => {
                let mut revisions = written.iter().map(|written| written.revision.0);
                let last = self.model.revision().0;
                match one_revision {
                    true => assert!(revisions.all(|revision| revision == last)),
                    false => assert!(revisions.eq(first..=last)),
                }
            }
            (Err(error), Err(expected)) => assert_eq!(error, expected),
            _ => panic!("{planned:?}: {written:?}, expected {expected:?}"),
        }
        self.compare();
    }

    /// The current state is the model's.
    fn compare(&self) {
        assert_eq!(self.store.revision(), self.model.revision());
        for key in keys() {
            let entry = self.store.get(&key).map(|e| (e.value.to_vec(), e.created, e.modified));
            let expected = self.model.now().get(&key).map(|(v, c, m)| (v.clone().into_bytes(), *c, *m));
            assert_eq!(entry, expected, "{key}");
        }
    }

    async fn list(&mut self, range: &Range, back: u64, limit: usize, between: Change) {
        let at = self.model.back(back);
        let mut options = ListOptions { limit: Some(limit), after: None, at: (back > 0).then_some(at) };
        let expected: Vec<_> = self.model.states[usize::try_from(at.0).unwrap()]
            .iter()
            .filter(|(key, _)| range.contains(key))
            .collect();
        let expected: Vec<_> =
            expected.into_iter().map(|(k, (v, c, m))| (k.clone(), v.clone(), *c, *m)).collect();
        let mut listed = Vec::new();
        loop {
            let page = match self.store.list(range, &options) {
                Ok(page) => page,
                Err(ListError::Expired { oldest }) => {
                    assert!(at < oldest);
                    assert!(self.model.may_have_forgotten(&range.resource, at));
                    return;
                }
                Err(error) => panic!("{error}"),
            };
            assert_eq!(page.revision, at);
            assert!(page.entries.len() <= limit);
            listed.extend(page.entries.iter().map(|entry| {
                let value = String::from_utf8(entry.value.to_vec()).unwrap();
                (entry.key.clone(), value, entry.created, entry.modified)
            }));
            assert_eq!(page.remaining, expected.len() - listed.len());
            assert_eq!(page.next.is_some(), page.remaining > 0);
            let Some(next) = page.next else { break };
            options = ListOptions { limit: Some(limit), after: Some(next), at: Some(at) };
            self.write(std::slice::from_ref(&between), false).await;
        }
        assert_eq!(listed, expected);
    }

    fn watch(&mut self, range: Range, after: Revision) {
        match self.store.watch(range.clone(), after) {
            Ok(watch) => {
                let next = self.model.events.partition_point(|event| event.revision <= after);
                self.watches.push(DrainedWatch { watch, range, seen: after, next });
            }
            Err(WatchError::TooOld { oldest }) => {
                assert!(after < oldest);
                assert!(self.model.may_have_forgotten(&range.resource, after));
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// Takes up to so many events; a watch that lagged is checked to have had reason to, and removed.
    fn drain(&mut self, index: usize, events: usize) {
        let DrainedWatch { watch, range, seen, next } = &mut self.watches[index];
        for _ in 0..events {
            let expected = self.model.next_event(range, *next);
            match watch.next().now_or_never() {
                Some(Ok(event)) => {
                    let (expected, position) = expected.expect("no event is to come");
                    assert_eq!(told(&event), *expected);
                    (*seen, *next) = (event.revision, position);
                    // A watch that is resumed there misses no event, and gets none again but the rest of a batch.
                    let to_come = self.model.next_event(range, *next).map(|(event, _)| event.revision);
                    let progress = watch.progress();
                    assert!(to_come.is_none_or(|to_come| progress < to_come), "{progress}");
                    assert_eq!(progress >= *seen, to_come != Some(*seen), "{progress}");
                }
                Some(Err(WatchClosed::Lagged { .. })) => {
                    assert!(self.model.may_have_forgotten(&range.resource, *seen));
                    self.watches.swap_remove(index);
                    return;
                }
                Some(Err(error)) => panic!("{error}"),
                None => {
                    assert_eq!(expected, None);
                    assert_eq!(watch.progress(), self.model.revision());
                    return;
                }
            }
        }
    }
}

fn told(event: &WriteEvent) -> Told {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    assert_eq!(event.entry.modified, event.revision);
    Told {
        revision: event.revision,
        kind: event.kind,
        key: event.entry.key.clone(),
        value: text(&event.entry.value),
        created: event.entry.created,
        previous: event.previous.as_ref().map(|previous| (text(&previous.value), previous.modified)),
    }
}

fn change() -> impl Strategy<Value = Change> {
    (0..keys().len(), 0u8..8, 0u8..3).prop_map(|(key, kind, expected)| Change { key, kind, expected })
}

fn step() -> impl Strategy<Value = Step> {
    let (range, back) = (0..ranges().len(), prop_oneof![Just(0u64), 1u64..60]);
    prop_oneof![
        32 => prop::collection::vec(change(), 1..2).prop_map(Step::Write),
        8 => prop::collection::vec(change(), 0..5).prop_map(Step::Write),
        8 => prop::collection::vec(change(), 0..5).prop_map(Step::Batch),
        8 => (range.clone(), back.clone(), 1usize..6, change())
            .prop_map(|(range, back, limit, between)| Step::List { range, back, limit, between }),
        4 => (range, back).prop_map(|(range, back)| Step::Watch { range, back }),
        8 => (any::<prop::sample::Index>(), 1usize..20).prop_map(|(watch, events)| Step::Drain { watch, events }),
        1 => Just(Step::Reopen),
    ]
}

fn config() -> Config {
    Config { history_events_max: HISTORY_EVENTS_MAX, ..Config::new("") }
}

/// Runs the steps on a store over one storage, which `open` opens as often as it is called.
fn check(open: Open<'_>, steps: Vec<Step>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async {
        let mut run = Run::start(open);
        for step in steps {
            run.step(step).await;
        }
        run.reopen().await;
        run.store.close().await;
    });
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(step(), 1..200)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_memory_backend_behaves_like_the_model(steps in steps()) {
        let storage = MemoryStorage::default();
        let open = |config| {
            let (stored, backend) = storage.open();
            Store::with_backend(config, stored, backend)
        };
        check(&open, steps);
    }

    #[test]
    fn a_shared_storage_in_memory_behaves_like_the_model(steps in steps()) {
        check_shared(&SharedStorage::in_memory(&config()), steps);
    }
}

fn check_shared(storage: &SharedStorage, steps: Vec<Step>) {
    let open = |config| {
        let (stored, backend) = storage.attach();
        Store::with_backend(config, stored, backend)
    };
    check(&open, steps);
}

proptest! {
    // Each write is synced to the disk.
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_sqlite_backend_behaves_like_the_model(steps in steps()) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("objects.db");
        check(&|config| Store::open(Config { path: path.clone(), ..config }).unwrap(), steps);
    }

    #[test]
    fn a_shared_sqlite_file_behaves_like_the_model(steps in steps()) {
        let folder = tempfile::tempdir().unwrap();
        let config = Config { path: folder.path().join("objects.db"), ..config() };
        check_shared(&SharedStorage::open(&config).unwrap(), steps);
    }
}
