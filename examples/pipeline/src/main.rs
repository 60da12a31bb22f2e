//! Three steps of a pipeline that counts words, in one program: each reads `/mayfly/in`, and writes the input of the
//! next one to `/mayfly/out`. Its output is the result; `workflow.yaml` connects the steps.

use std::{collections::BTreeMap, error::Error, fs};

use serde_json::{Value, json};

const IN: &str = "/mayfly/in";
const OUT: &str = "/mayfly/out";
const ARTIFACTS: &str = "/mayfly/out/artifacts";

fn main() -> Result<(), Box<dyn Error>> {
    match std::env::args().nth(1).as_deref() {
        Some("extract") => extract(),
        Some("transform") => transform(),
        Some("summary") => summary(),
        other => Err(format!("no such step: {other:?}").into()),
    }
}

/// Splits a text into parts of some lines: a folder of files, and their names.
fn extract() -> Result<(), Box<dyn Error>> {
    let text = fs::read_to_string(format!("{IN}/text"))?;
    let lines: usize = fs::read_to_string(format!("{IN}/linesPerPart"))?.trim().parse()?;
    let lines_of_text: Vec<&str> = text.lines().collect();
    fs::create_dir(format!("{ARTIFACTS}/parts"))?;
    let mut names = Vec::new();
    for (number, part) in lines_of_text.chunks(lines.max(1)).enumerate() {
        let name = format!("part-{number}.txt");
        fs::write(format!("{ARTIFACTS}/parts/{name}"), part.join("\n"))?;
        names.push(name);
    }
    eprintln!("{} lines, {} parts", lines_of_text.len(), names.len());
    println!("{}", json!(names));
    Ok(())
}

/// Counts the words of one part.
fn transform() -> Result<(), Box<dyn Error>> {
    let part = fs::read_to_string(format!("{IN}/part"))?;
    let text = fs::read_to_string(format!("{IN}/parts/{part}"))?;
    let mut counts = BTreeMap::new();
    for word in text.split(|letter: char| !letter.is_alphanumeric()).filter(|word| !word.is_empty()) {
        *counts.entry(word.to_lowercase()).or_insert(0_u64) += 1;
    }
    println!("{}", json!(counts));
    Ok(())
}

/// Adds up the counts of the parts. All parameters are also on stdin, as one object.
fn summary() -> Result<(), Box<dyn Error>> {
    let parameters: Value = serde_json::from_reader(std::io::stdin())?;
    let mut total: BTreeMap<&str, u64> = BTreeMap::new();
    for counts in parameters["counts"].as_array().into_iter().flatten().filter_map(Value::as_object) {
        for (word, count) in counts {
            *total.entry(word).or_default() += count.as_u64().unwrap_or(0);
        }
    }
    let words: u64 = total.values().sum();
    let table: String = total.iter().map(|(word, count)| format!("{count}\t{word}\n")).collect();
    fs::write(format!("{ARTIFACTS}/words.tsv"), table)?;
    fs::write(format!("{OUT}/words"), words.to_string())?;
    let most = total.iter().max_by_key(|(_, count)| **count).map(|(word, _)| word);
    println!("{}", json!({"words": words, "different": total.len(), "most": most}));
    Ok(())
}
