use std::{
    collections::HashSet,
    sync::atomic::{AtomicUsize, Ordering},
};

use proptest::prelude::*;
use tokio::sync::mpsc;

use super::*;

const PLAIN: Backoff = Backoff { first: Duration::from_millis(100), most: Duration::from_secs(1) };

#[test]
fn queue_script() {
    let now = Instant::now();
    let mut queue = KeyQueue::new(PLAIN);
    queue.add("a");
    queue.add("b");
    queue.add("a");
    assert_eq!(queue.next(now), Next::Key("a"));
    queue.add("a"); // while it is worked on
    assert_eq!(queue.next(now), Next::Key("b"));
    assert_eq!(queue.next(now), Next::At(None));
    queue.succeeded("a", None);
    assert_eq!(queue.next(now), Next::Key("a"), "a key added during the work is not lost");
    queue.succeeded("b", Some(now + Duration::from_secs(5)));
    assert_eq!(queue.next(now), Next::At(Some(now + Duration::from_secs(5))));
    queue.add_at("b", now + Duration::from_secs(9));
    assert_eq!(queue.next(now + Duration::from_secs(5)), Next::Key("b"), "the earlier time holds");
}

#[test]
fn failures_pause_longer_each_time_until_a_success() {
    let now = Instant::now();
    let mut queue = KeyQueue::new(PLAIN);
    queue.add("a");
    for (failures, full_ms) in [(1, 100), (2, 200), (3, 400)] {
        queue.next(now + Duration::from_secs(60));
        assert_eq!(queue.failed("a", now), failures);
        let Next::At(Some(at)) = queue.next(now) else { panic!("it must wait") };
        assert!(at - now <= Duration::from_millis(full_ms) && at - now >= Duration::from_millis(full_ms / 2));
    }
    queue.next(now + Duration::from_secs(60));
    queue.succeeded("a", None);
    queue.add("a");
    queue.next(now);
    assert_eq!(queue.failed("a", now), 1);
}

proptest! {
    /// No key is worked on twice at once, and no added key is lost.
    #[test]
    fn serial_per_key_and_nothing_lost(steps in prop::collection::vec((0..4u8, 0..5u8), 1..200)) {
        let now = Instant::now();
        let mut queue = KeyQueue::new(PLAIN);
        let (mut in_work, mut owed) = (HashSet::new(), HashSet::new());
        for (step, key) in steps {
            match step {
                0 => { queue.add(key); owed.insert(key); }
                1 => { queue.add_at(key, now); owed.insert(key); }
                2 => if let Next::Key(key) = queue.next(now) {
                    prop_assert!(in_work.insert(key), "{} is already in work", key);
                    owed.remove(&key);
                },
                _ => if in_work.remove(&key) {
                    if key % 2 == 0 { queue.succeeded(key, None) } else { queue.failed(key, now); owed.insert(key); }
                },
            }
        }
        for key in in_work {
            queue.succeeded(key, None);
        }
        while let Next::Key(key) = queue.next(now + Duration::from_secs(10)) {
            owed.remove(&key);
            queue.succeeded(key, None);
        }
        prop_assert!(owed.is_empty(), "forgotten: {:?}", owed);
    }
}

#[tokio::test(start_paused = true)]
async fn runs_in_parallel_retries_and_survives_panics() {
    let queue = WorkQueue::new(PLAIN);
    let stop = CancellationToken::new();
    let (seen, mut keys) = mpsc::channel(16);
    let tries = Arc::new(AtomicUsize::new(0));
    let worker = run("test", queue.clone(), 4, stop.clone(), {
        let tries = tries.clone();
        move |key: &'static str| {
            let (seen, tries) = (seen.clone(), tries.clone());
            async move {
                match key {
                    "fails" if tries.fetch_add(1, Ordering::SeqCst) < 2 => return Err("not yet"),
                    "panics" if tries.fetch_add(1, Ordering::SeqCst) < 4 => panic!("on purpose"),
                    _ => {}
                }
                seen.send(key).await.map_err(|_| "closed")?;
                Ok(Outcome::Done)
            }
        }
    });
    let worker = tokio::spawn(worker);
    queue.add("fails");
    assert_eq!(keys.recv().await, Some("fails"));
    assert_eq!(tries.load(Ordering::SeqCst), 3);
    queue.add("panics");
    assert_eq!(keys.recv().await, Some("panics"));
    assert_eq!(tries.load(Ordering::SeqCst), 5);
    stop.cancel();
    worker.await.unwrap();
}
