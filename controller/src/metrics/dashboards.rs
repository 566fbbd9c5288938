//! Holds the dashboards against the table of metrics: names, labels, functions, brackets.

use super::{Metric, PASS_SECONDS, TABLE};
use std::collections::BTreeSet;

/// PromQL that the dashboards may use. A name that stands neither here nor in the table is a typo.
const FUNCTIONS: [&str; 11] =
    ["sum", "count", "max", "min", "avg", "rate", "deriv", "abs", "histogram_quantile", "by", "label_values"];

#[derive(Debug, Clone, PartialEq)]
enum Word {
    Name(String),
    Text,
    Sign(char),
}

/// Names, texts in quotes, and every other character that is no space.
fn words(expr: &str) -> Vec<Word> {
    let mut words = Vec::new();
    let mut rest = expr.chars().peekable();
    while let Some(first) = rest.next() {
        match first {
            ' ' => {}
            '"' => {
                assert!(rest.any(|c| c == '"'), "a text without an end in {expr}");
                words.push(Word::Text);
            }
            c if c.is_ascii_alphabetic() || c == '_' => {
                let mut name = String::from(c);
                while let Some(c) = rest.next_if(|c| c.is_ascii_alphanumeric() || *c == '_') {
                    name.push(c);
                }
                words.push(Word::Name(name));
            }
            // A number and its unit.
            c if c.is_ascii_digit() => while rest.next_if(|c| c.is_ascii_alphanumeric() || *c == '.').is_some() {},
            c => words.push(Word::Sign(c)),
        }
    }
    words
}

/// The metric of a name; a histogram has three series.
fn metric(name: &str) -> Option<&'static Metric> {
    let histogram = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| name.strip_suffix(suffix));
    let histogram = histogram.filter(|base| *base == PASS_SECONDS.name);
    TABLE.iter().find(|m| histogram.map_or(m.name == name && m.name != PASS_SECONDS.name, |base| m.name == base))
}

/// Checks an expression; returns its metrics and the labels that its series have.
fn check(expr: &str) -> Result<(usize, BTreeSet<&'static str>), String> {
    let mut open = Vec::new();
    let mut names = Vec::new();
    let mut labels: BTreeSet<&'static str> = BTreeSet::from(["le"]);
    for word in words(expr) {
        match word {
            Word::Sign(sign @ ('(' | '[' | '{')) => open.push(sign),
            Word::Sign(sign @ (')' | ']' | '}')) => {
                let partner = open.pop().map(|o| format!("{o}{sign}")).unwrap_or_default();
                if !["()", "[]", "{}"].contains(&partner.as_str()) {
                    return Err(format!("brackets do not match in {expr}"));
                }
            }
            Word::Name(name) => match metric(&name) {
                Some(metric) => {
                    names.push(metric.name);
                    labels.extend(metric.labels);
                }
                None => {
                    let known = FUNCTIONS.contains(&name.as_str()) || TABLE.iter().any(|m| m.labels.contains(&&*name));
                    if !known {
                        return Err(format!("{name} in {expr} is no metric, label or function"));
                    }
                    // Checked against the labels of the whole expression, whose metric may come later.
                    if !FUNCTIONS.contains(&name.as_str()) && !wanted(expr).contains(&name) {
                        return Err(format!("the metrics of {expr} have no label {name}"));
                    }
                }
            },
            Word::Text | Word::Sign(_) => {}
        }
    }
    if open.is_empty() { Ok((names.len(), labels)) } else { Err(format!("a bracket is open in {expr}")) }
}

/// Labels of all metrics of an expression.
fn wanted(expr: &str) -> BTreeSet<String> {
    let of = |word| match word {
        Word::Name(name) => metric(&name).map(|m| m.labels),
        _ => None,
    };
    words(expr).into_iter().filter_map(of).flatten().map(|label| (*label).to_owned()).collect()
}

/// Every `expr`, with the `legendFormat` beside it, and every `query` of a variable.
fn queries(value: &serde_json::Value, found: &mut Vec<(String, String)>) {
    if let Some(fields) = value.as_object() {
        let text = |key: &str| fields.get(key).and_then(serde_json::Value::as_str);
        let query = text("query").filter(|q| q.contains('('));
        let legend = text("legendFormat").unwrap_or_default();
        found.extend(text("expr").or(query).map(|expr| (expr.to_owned(), legend.to_owned())));
        fields.values().for_each(|inner| queries(inner, found));
    }
    value.as_array().into_iter().flatten().for_each(|inner| queries(inner, found));
}

/// `{{label}}` in a legend.
fn legend_labels(legend: &str) -> Vec<&str> {
    legend.split("{{").skip(1).filter_map(|part| part.split("}}").next()).map(str::trim).collect()
}

#[test]
fn dashboards_use_only_metrics_and_labels_that_exist() {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../dashboards");
    let mut count = 0;
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        let mut found = Vec::new();
        queries(&serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display())), &mut found);
        for (expr, legend) in found {
            let (metrics, labels) = check(&expr).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            assert!(metrics > 0, "{}: no metric in {expr}", path.display());
            for label in legend_labels(&legend) {
                assert!(labels.contains(label), "{}: {expr} has no label {label} for {legend}", path.display());
            }
            count += 1;
        }
    }
    assert!(count > 30, "the dashboards show next to nothing: {count}");
}

/// A scrape's own labels: what a target exports under such a name is renamed to `exported_NAME`, where no dashboard finds it.
#[test]
fn no_label_is_one_that_a_scrape_sets() {
    for metric in TABLE {
        for label in metric.labels {
            let taken =
                ["job", "instance"].contains(label) || label.starts_with("__") || label.starts_with("exported_");
            assert!(!taken, "{} has a label {label}", metric.name);
        }
    }
}

#[test]
fn mistakes_are_seen() {
    for (expr, said) in [
        ("flexcomm_node_live_count", "no metric"),
        ("flexcomm_loop_pass_seconds", "no metric"),
        ("rat(flexcomm_node_live)", "no metric"),
        ("flexcomm_node_live{training_job=\"x\"}", "no label training_job"),
        ("sum by (rank) (flexcomm_node_live)", "no metric, label"),
        ("sum(flexcomm_node_live", "open"),
        ("sum(flexcomm_node_live]", "match"),
    ] {
        let error = check(expr).unwrap_err();
        assert!(error.contains(said), "{expr}: {error}");
    }
    let fine = "histogram_quantile(0.95, rate(flexcomm_loop_pass_seconds_bucket[5m]))";
    assert_eq!(check(fine).unwrap().0, 1);
    assert_eq!(legend_labels("{{from}} to {{ to }}"), ["from", "to"]);
}
