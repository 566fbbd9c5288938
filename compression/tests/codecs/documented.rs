//! `COMPRESSORS.md` says what is: one row for each compressor, memory and momentum, with its definition and tests that exist;
//! `FORMAT.md` which code is whose.

use crate::harness::parse;
use flexcomm_compression::codec::{Element, Travels};
use flexcomm_compression::entry::Entry;
use flexcomm_compression::methods;
use flexcomm_domain::spec::{MEMORIES, MOMENTA};
use std::path::Path;

const TABLES: &str = include_str!("../../COMPRESSORS.md");
const FORMAT: &str = include_str!("../../FORMAT.md");

/// Cells of the rows of tables with so many columns, heads left out.
fn rows(columns: usize) -> Vec<Vec<&'static str>> {
    let cells = |line: &'static str| line.trim_matches('|').split(" | ").map(str::trim).collect::<Vec<_>>();
    let rows = TABLES.lines().filter(|line| line.starts_with("| ")).map(cells);
    rows.filter(|row| row.len() == columns && !["compressor", "part"].contains(&row[0])).collect()
}

/// All sources of tests, by the name of their file.
fn sources() -> Vec<(String, String)> {
    fn walk(folder: &Path, out: &mut Vec<(String, String)>) {
        for file in std::fs::read_dir(folder).unwrap() {
            let path = file.unwrap().path();
            match path.extension() {
                _ if path.is_dir() => walk(&path, out),
                Some(rust) if rust == "rs" => {
                    let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
                    out.push((name, std::fs::read_to_string(&path).unwrap()));
                }
                _ => {}
            }
        }
    }
    let mut out = Vec::new();
    ["src", "tests"].iter().for_each(|folder| walk(&Path::new(env!("CARGO_MANIFEST_DIR")).join(folder), &mut out));
    out
}

/// `file::name`, each in backquotes: a test of that name in a file of that name.
fn assert_tests_exist(cell: &str, sources: &[(String, String)]) {
    assert!(!cell.is_empty());
    for test in cell.split(", ") {
        let (file, name) = test.trim_matches('`').split_once("::").unwrap_or_else(|| panic!("{test}: file::name"));
        let defines = |source: &str| {
            source.split_once(&format!("fn {name}(")).is_some_and(|(before, _)| before.trim_end().ends_with("#[test]"))
        };
        assert!(sources.iter().any(|(stem, source)| stem == file && defines(source)), "{test}: there is no such test");
    }
}

/// How messages travel, over all examples.
fn travels(entry: &Entry) -> String {
    let mut ways: Vec<&str> = Vec::new();
    for args in entry.examples {
        let way = match parse(&format!("{}({args})", entry.info.name)).travels() {
            Travels::Sums(Element::F32) => "sums f32",
            Travels::Sums(Element::F16) => "sums f16",
            Travels::Sums(Element::Bf16) => "sums bf16",
            Travels::Gathers => "gathers",
        };
        if !ways.contains(&way) {
            ways.push(way);
        }
    }
    ways.join(" or ")
}

#[test]
fn every_compressor_has_its_row() {
    let (rows, sources) = (rows(6), sources());
    for entry in methods::all() {
        let row: Vec<_> = rows.iter().filter(|row| row[0] == entry.info.name).collect();
        let [row] = row[..] else { panic!("{}: {} rows", entry.info.name, row.len()) };
        let (code, way) = (entry.code.to_string(), travels(entry));
        assert_eq!(row[1..5], [&code, &way, entry.info.scope.as_str(), entry.info.source], "{}", entry.info.name);
        assert_tests_exist(row[5], &sources);
    }
    assert_eq!(rows.len(), methods::all().count(), "a row for each, and no more");
}

/// A code is never used again: `FORMAT.md` has a row for each, also for those of methods that are gone.
#[test]
fn every_code_is_its_method_s_in_the_format() {
    let (_, payloads) = FORMAT.split_once("\n## Payloads\n").unwrap();
    let code_and_method = |line: &'static str| {
        let mut cells = line.strip_prefix("| ")?.split(" | ");
        Some((cells.next()?.parse::<u8>().ok()?, cells.next()?))
    };
    let rows: Vec<_> = payloads.lines().filter_map(code_and_method).collect();
    for entry in methods::all() {
        let of: Vec<_> = rows.iter().filter(|row| row.0 == entry.code).map(|row| row.1).collect();
        assert_eq!(of, [entry.info.name], "rows of code {} in FORMAT.md", entry.code);
    }
}

#[test]
fn every_memory_and_momentum_has_its_row() {
    let (rows, sources) = (rows(3), sources());
    let memories = MEMORIES.iter().map(|memory| format!("ef({})", memory.name));
    let names: Vec<String> = memories.chain(MOMENTA.iter().map(|momentum| momentum.name.to_owned())).collect();
    assert_eq!(rows.iter().map(|row| row[0]).collect::<Vec<_>>(), names);
    rows.iter().for_each(|row| assert_tests_exist(row[2], &sources));
}
