//! What starts executions by itself: times and events.
//!
//! [`plan`] says, for one schedule and one moment, what to do next; it has no clock. [`run`] keeps every trigger's
//! state, starts what is due and writes it down in the workflow's status; [`rules`] are the event patterns of all
//! workflows, which [`super::events`] asks.
//!
//! An execution is named after its trigger and the time it was scheduled for (or the event's id), so that a crash
//! between the start and the note of it starts nothing twice: the second start finds the first one's name taken.
//! (EXPRESS executions have no names of their own: there a crash may start one twice.)

mod plan;
mod rules;
mod run;

pub use rules::{EventRules, Fired};
pub use run::Triggers;

use mayfly_workflows_api::Api;
use serde_json::{Value, json};

use super::objects::scope;

/// The result of a start.
#[derive(Debug)]
enum Start {
    /// It runs; its ARN.
    Started(String),
    /// The name is taken: it was started before.
    Before,
    /// It was refused, and would be again.
    Refused(String),
    /// It may go well the next time.
    Failed(String),
}

/// Starts an execution under a name.
async fn start(api: &Api, machine: &str, name: &str, input: &Value) -> Start {
    let request = json!({"stateMachineArn": machine, "name": name, "input": input.to_string()});
    match Box::pin(api.call("StartExecution", &request, &scope(machine))).await {
        Ok(answer) => Start::Started(answer["executionArn"].as_str().unwrap_or_default().to_owned()),
        Err(error) if error.code == "ExecutionAlreadyExists" => Start::Before,
        Err(error) => {
            let why = format!("{}: {}", error.code, error.message.unwrap_or_default());
            match error.status < 500 && error.code != "ExecutionLimitExceeded" {
                true => Start::Refused(why),
                false => Start::Failed(why),
            }
        }
    }
}
