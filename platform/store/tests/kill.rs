//! Killed in the middle of writing, many times: nothing acknowledged is lost.
//!
//! The test runs this very binary again as a child that writes as fast as it can and says on its
//! standard output what was acknowledged, kills it without warning, and looks at the file.

use std::{
    collections::HashMap,
    env,
    io::{BufRead as _, BufReader, Write as _},
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use mayfly_store::{Config, Key, Store, Write, WriteError};

const ROUNDS: u32 = 24;
const CLIENTS: usize = 16;
const PATH: &str = "STORE_KILL_TEST_PATH";

/// The operations that the child's clients perform in turn, each on keys of its own.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Operation {
    Create,
    /// Creates another object and updates the counter, both or none.
    CreateAndCount,
    Delete,
}

impl Operation {
    fn of(step: u64) -> Self {
        [Self::Create, Self::CreateAndCount, Self::Delete][(step % 3) as usize]
    }
}

fn counter(client: usize) -> Key {
    Key::new("counters", "", client.to_string())
}

/// The state of a client: an object for each step since its last delete, and the count.
#[derive(Clone, Debug, Default, PartialEq)]
struct Expected {
    count: Option<u64>,
    objects: Vec<u64>,
}

impl Expected {
    fn apply(&mut self, step: u64) {
        match Operation::of(step) {
            Operation::Create => self.objects.push(step),
            Operation::CreateAndCount => {
                self.objects.push(step);
                self.count = Some(step);
            }
            Operation::Delete => drop(self.objects.remove(0)),
        }
    }

    fn found(store: &Store, client: usize) -> Self {
        let value = |bytes: &[u8]| std::str::from_utf8(&bytes[..20]).unwrap().trim().parse().unwrap();
        let range = mayfly_store::Range::namespace("objects", client.to_string());
        let listing = store.list(&range, &Default::default()).unwrap();
        let objects = listing.entries.iter().map(|entry| {
            let step: u64 = value(&entry.value);
            assert_eq!(*entry.key.name, format!("{step:09}"));
            step
        });
        Self {
            count: store.get(&counter(client)).map(|entry| value(&entry.value)),
            objects: objects.collect(),
        }
    }
}

/// Not a test by itself: does nothing unless the test below started it.
#[test]
#[ignore = "the child of nothing_acknowledged_is_lost"]
fn child() {
    let Some(path) = env::var_os(PATH) else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        // A short log, so that many a kill meets a checkpoint.
        let store = Store::open(Config { log_bytes_max: 400_000, ..Config::new(path) }).unwrap();
        let clients = (0..CLIENTS).map(|client| tokio::spawn(write_for_ever(store.clone(), client)));
        for client in futures::future::join_all(clients).await {
            client.unwrap().unwrap();
        }
    });
}

async fn write_for_ever(store: Store, client: usize) -> Result<(), WriteError> {
    let mut state = Expected::found(&store, client);
    // The step after the newest one that left a trace; a delete leaves an object less.
    let newest = state.objects.last().copied();
    let mut step = newest.map_or(0, |newest| newest + 1);
    if newest.is_some() && Operation::of(step) == Operation::Delete {
        // Two made and one deleted in every three steps: one more than those is left before it.
        let deleted = state.objects.len() as u64 <= step / 3 + 1;
        step += u64::from(deleted);
    }
    loop {
        let object = |step: u64| Key::new("objects", client.to_string(), format!("{step:09}"));
        // Sizes differ, so that rows move between pages.
        let value =
            bytes::Bytes::from(format!("{step:20}{}", "x".repeat(usize::try_from(step % 37 * 50).unwrap())));
        let create = Write::Create { key: object(step), value: value.clone() };
        let writes = match Operation::of(step) {
            Operation::Create => vec![create],
            Operation::CreateAndCount => {
                let key = counter(client);
                let count = match state.count {
                    None => Write::Create { key, value },
                    Some(_) => Write::Update { key, value, expected: None },
                };
                vec![create, count]
            }
            Operation::Delete => vec![Write::Delete { key: object(state.objects[0]), expected: None }],
        };
        let written = store.write_all(writes).await?;
        state.apply(step);
        let revision = written.last().unwrap().revision;
        // One short write to a pipe arrives whole or not at all.
        let line = format!("\nacknowledged {client} {step} {revision}\n");
        if std::io::stdout().write_all(line.as_bytes()).is_err() {
            return Ok(());
        }
        step += 1;
    }
}

/// Runs the child for a while, kills it, and returns (client, step, revision) as acknowledged.
fn run_and_kill(path: &Path, lifetime: Duration) -> Vec<(usize, u64, u64)> {
    let mut child = Command::new(env::current_exe().unwrap())
        .args(["--exact", "child", "--ignored", "--nocapture", "--test-threads", "1"])
        .env(PATH, path)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut acknowledged = Vec::new();
    let mut begin = None;
    for line in lines.map_while(Result::ok) {
        let Some(line) = line.strip_prefix("acknowledged ") else { continue };
        let numbers: Vec<u64> = line.split(' ').map(|number| number.parse().unwrap()).collect();
        acknowledged.push((usize::try_from(numbers[0]).unwrap(), numbers[1], numbers[2]));
        // Counted from the first output, so that every round gets to write.
        if begin.get_or_insert_with(Instant::now).elapsed() >= lifetime {
            child.kill().unwrap();
        }
    }
    child.wait().unwrap();
    acknowledged
}

#[test]
fn nothing_acknowledged_is_lost() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("objects.db");
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let mut expected: HashMap<usize, (u64, Expected)> = HashMap::new();
    let mut newest = 0;
    let mut total = 0;
    for round in 0..ROUNDS {
        // Spread over a commit's duration and beyond, in an order that does not matter.
        let lifetime = Duration::from_micros(u64::from(round) * 7919 % 24 * 1500);
        let acknowledged = run_and_kill(&path, lifetime);
        assert!(!acknowledged.is_empty(), "round {round}: the child wrote nothing");
        total += acknowledged.len();
        for (client, step, revision) in acknowledged {
            let (next, state) = expected.entry(client).or_default();
            assert_eq!(step, *next, "round {round}: what client {client} did");
            state.apply(step);
            *next += 1;
            newest = newest.max(revision);
        }
        let store = Store::open(Config::new(&path)).unwrap();
        assert!(store.revision().0 >= newest, "round {round}: at {}, was at {newest}", store.revision());
        for client in 0..CLIENTS {
            let found = Expected::found(&store, client);
            let (next, state) = expected.entry(client).or_default();
            if found == *state {
                continue;
            }
            // One step may have been in flight. This read has observed it, so it must persist like an acknowledged
            // one.
            state.apply(*next);
            assert_eq!(found, *state, "round {round}: client {client}, after step {next}");
            *next += 1;
        }
        newest = store.revision().0;
        runtime.block_on(store.close());
    }
    assert!(total > 1000, "only {total} writes in {ROUNDS} rounds");
}
