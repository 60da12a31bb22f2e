//! Asks a person for approval: prints the commands with their answers. A real function would send a mail with two
//! links.

use mayfly::Error;
use serde::{Deserialize, Serialize};

#[derive(Deserialize)]
struct Question {
    /// The task token, with which the waiting task is completed.
    token: String,
    what: String,
}

#[derive(Serialize)]
struct Asked {
    asked: bool,
}

#[mayfly::event]
async fn approval(question: Question) -> Result<Asked, Error> {
    let url = mayfly::config::get("WORKFLOWS_URL").unwrap_or_else(|| "http://127.0.0.1:8083".to_owned());
    let aws = format!("aws stepfunctions --region us-east-1 --endpoint-url {url}");
    let Question { token, what } = question;
    println!("May we? {what}");
    println!("  yes: {aws} send-task-success --task-token {token} --task-output '{{\"by\": \"me\"}}'");
    println!("  no:  {aws} send-task-failure --task-token {token} --error Rejected --cause 'too expensive'");
    Ok(Asked { asked: true })
}
