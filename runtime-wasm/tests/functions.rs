//! Functions of the examples, called as the gateway calls them.

mod support;

use mayfly_runtime::Timings;
use support::*;

#[tokio::test(flavor = "multi_thread")]
async fn hello_answers_cold_and_warm() {
    let hello = guest!("hello");
    let fixture = Fixture::new();
    let function = fixture.function(hello, |_| {}).await;
    assert!(!function.is_loaded());
    let answer = call(&function, get("/")).await.unwrap();
    assert!(answer.timings.cold && !answer.timings.load.is_zero(), "{:?}", answer.timings);
    assert_eq!(text(answer).await.1, "Hello from Mayfly!\n");
    assert!(function.is_loaded());
    let answer = call(&function, get("/")).await.unwrap();
    assert!(!answer.timings.cold && answer.timings.load.is_zero());
    assert_ne!(answer.timings, Timings::default());
    assert_eq!(text(answer).await.1, "Hello from Mayfly!\n");
    function.unload();
    assert!(!function.is_loaded());
    assert_eq!(ask(&function, "/").await.1, "Hello from Mayfly!\n");
}
