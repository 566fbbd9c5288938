//! `flexcomm plan` as users start it: text, JSON, and what it says to bad input.
#![allow(clippy::unwrap_used, missing_docs)]

use flexcomm_domain::spec::Travels;
use flexcomm_domain::{Collective, Family, Pattern, Plan};
use std::process::{Command, Output};

const NETWORK: [&str; 6] = ["--workers", "8", "--latency", "1ms", "--bandwidth", "10gbit"];

/// Of top-k under STAR, whose numbers these tests know, unless they say otherwise.
fn run(args: &[&str]) -> Output {
    let others = args.contains(&"--compressors");
    let topk: &[&str] = if others { &[] } else { &["--compressors", "topk", "--selection", "star"] };
    Command::new(env!("CARGO_BIN_EXE_flexcomm")).arg("plan").args(args).args(topk).output().unwrap()
}

/// How many collectives do that: each is a row for what travels so.
fn by(pattern: Pattern) -> usize {
    Collective::ALL.iter().filter(|collective| collective.pattern() == pattern).count()
}

/// Rows of top-k under one selection at one ratio.
fn of_topk() -> usize {
    by(Pattern::Allgather) + by(Pattern::ArTopk)
}

fn on_network(args: &[&str]) -> Output {
    run(&[&NETWORK[..], args].concat())
}

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn json(output: &Output) -> serde_json::Value {
    serde_json::from_str(&text(output)).unwrap()
}

fn file(name: &str, content: &str) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, content).unwrap();
    let path = path.to_str().unwrap().to_owned();
    (folder, path)
}

/// Refused, with a status that is not 0, nothing on standard output, and these words.
fn refused(args: &[&str], words: &[&str]) {
    let output = run(args);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && output.stdout.is_empty(), "{args:?} was accepted");
    assert!(words.iter().all(|w| said.contains(w)), "{args:?} {words:?}: {said}");
    assert!(said.len() < 1500 && !said.contains("panicked"), "{said}");
}

fn refused_on_network(args: &[&str], words: &[&str]) {
    refused(&[&NETWORK[..], args].concat(), words);
}

#[test]
fn json_is_as_documented() {
    let answer = json(&on_network(&["--params", "25.56M", "--crs", "0.1,0.01,0.001", "--compute", "50ms", "--json"]));
    let keys = |v: &serde_json::Value| v.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(keys(&answer), ["assumed", "choice", "costs", "front"]);
    let costs = answer["costs"].as_array().unwrap();
    assert_eq!(costs.len(), by(Pattern::Allreduce) + 3 * of_topk());
    for point in costs.iter().chain(answer["front"].as_array().unwrap()) {
        let times = ["t_comp_s", "t_quality_s", "t_step_s", "t_sync_s", "variance"];
        let names = ["break_even_gain", "collective", "compressor", "cr", "gain", "strategy"];
        assert_eq!(keys(point), [&names[..], &times[..]].concat());
        let strategy: flexcomm_domain::Strategy = point["strategy"].as_str().unwrap().parse().unwrap();
        assert_eq!(
            (strategy.family().name(), strategy.cr().get()),
            (point["compressor"].as_str().unwrap(), point["cr"].as_f64().unwrap())
        );
        assert_eq!(point["collective"], strategy.collective().as_str(), "{point}");
    }
    let choice = &answer["choice"];
    assert!(choice["why"].as_str().unwrap().contains("time-to-quality"));
    assert!(costs.iter().any(|c| c["collective"] == choice["collective"] && c["cr"] == choice["cr"]));
    assert_eq!(choice.get("bucket_crs"), None);
    // Equation (4a) by hand at 0.8 ns per byte: 17 latencies; 3 times a header of 44 bytes, a byte for the coding and Elias-Fano's
    // 3 low bits of 2,556,000 indices and 5,751,001 upper ones; 1.75 times 10.224 MB of values.
    let art_ring = costs.iter().find(|c| c["collective"] == "art-ring" && c["cr"] == 0.1).unwrap();
    let by_hand = 0.017 + 0.8e-9 * (3.0 * (45.0 + 958_500.0 + 718_876.0) + 1.75 * 10.224e6);
    assert!((art_ring["t_sync_s"].as_f64().unwrap() - by_hand).abs() < 1e-9, "{art_ring}");
}

#[test]
fn workers_of_one_node_share_its_nic() {
    let sync = |per_node: &[&str], collective: &str| {
        let args =
            ["--params", "25M", "--crs", "0.1", "--workers", "4", "--latency", "0s", "--bandwidth", "1gbit", "--json"];
        let answer = json(&run(&[&args[..], per_node].concat()));
        let costs = answer["costs"].as_array().unwrap();
        costs.iter().find(|c| c["collective"] == collective).unwrap()["t_sync_s"].as_f64().unwrap()
    };
    let times = |collective| sync(&["--per-node", "2"], collective) / sync(&[], collective);
    let near = |a: f64, b: f64| (a / b - 1.0).abs() < 0.1;
    // A ring leaves each node once, whose ranks' links are fast; of what is gathered by doubling both of a node send to the other at once: 4 messages through its NIC,
    // where each rank by itself receives 3.
    assert!(near(times("dense-ring"), 1.0), "{}", times("dense-ring"));
    assert!(near(times("allgather"), 4.0 / 3.0), "{}", times("allgather"));
    let (_folder, square) = file("links.csv", "-,1ms/1gbit\n1ms/1gbit,-\n");
    refused(&["--params", "1M", "--per-node", "2", "--links", &square], &["--per-node", "--links"]);
    refused_on_network(&["--params", "1M", "--per-node", "9"], &["--per-node is 9 of 8 workers"]);
}

#[test]
fn people_read_one_unit_per_column_and_when_dense_is_best() {
    let slow = text(&run(&["--params", "60M", "--workers", "8", "--latency", "50ms", "--bandwidth", "100mbit"]));
    assert!(slow.contains("t_sync ms"), "{slow}");
    let rows: Vec<&str> = slow.lines().filter(|l| l.contains("dense-") || l.contains("allgather ")).collect();
    let times = rows.iter().filter(|l| l.starts_with(['>', ' '])).map(|l| l.split_whitespace().collect::<Vec<_>>());
    for cells in times.filter(|c| c.len() >= 7 && !c.contains(&"(assumed:")) {
        let last = cells.len() - usize::from(cells.last() == Some(&"*"));
        assert!(cells[last - 5..last].iter().all(|c| c.parse::<f64>().is_ok()), "{cells:?}");
    }
    assert!(
        slow.contains("Choice: ") && slow.contains("* on the Pareto front") && !slow.contains("\nDense is best"),
        "{slow}"
    );
    let fast = text(&run(&["--params", "1M", "--workers", "2", "--latency", "1us", "--bandwidth", "400gbit"]));
    assert!(fast.contains("Dense is best here at any gain: compression would not pay."), "{fast}");
    assert!(fast.contains("At no gain would topk at 0.1") && !fast.contains("Break-even"), "{fast}");
    let assumed = text(&on_network(&["--params", "25M", "--exponent", "1"]));
    assert!(assumed.contains("Under the assumed gain c^0.6 dense is best here"), "{assumed}");
    assert!(assumed.contains("Break-even") && !assumed.contains("would not pay"), "{assumed}");
    let knee = text(&on_network(&["--params", "25M", "--policy", "knee"]));
    assert!(!knee.to_lowercase().contains("break-even") && !knee.contains("At no gain"), "{knee}");
    let alone = text(&run(&["--params", "1M", "--workers", "1", "--latency", "1ms", "--bandwidth", "1gbit"]));
    assert!(alone.contains("1 worker, every link"), "{alone}");
}

/// Break-even gains are of rows that the table shows, of one strategy for all buckets alike, and never shown as 0.
#[test]
fn break_even_gains_are_of_the_table_s_rows() {
    let network = ["--workers", "8", "--latency", "50us", "--bandwidth", "25gbit", "--compute", "80ms"];
    let slow = ["--workers", "8", "--latency", "1ms", "--bandwidth", "1gbit", "--compute", "1ms"];
    for (network, buckets) in [(&network[..], &[][..]), (&slow, &[]), (&slow, &["--buckets", "10"])] {
        let args = ["--params", "25.56M", "--compressors", "topk,powersgd,fp16"];
        let shown = text(&run(&[&args[..], network, buckets].concat()));
        let (table, even) = shown.split_once("Break-even").unwrap_or_else(|| panic!("{shown}"));
        let rows: Vec<&str> = even.lines().skip(1).take_while(|line| line.starts_with("  ")).collect();
        assert!(!rows.is_empty(), "{shown}");
        for row in rows {
            // Compressor and collective are the same columns in both.
            assert!(table.lines().any(|line| line.get(2..38) == row.get(2..38)), "{row}: {shown}");
            assert!(!row.contains("0.0000"), "{row}");
        }
        assert_eq!(even.starts_with(" in all buckets alike,"), !buckets.is_empty(), "{shown}");
    }
}

#[test]
fn delay_costs_a_longer_training_less() {
    let seconds = |steps: &[&str]| {
        let args = ["--params", "25M", "--compute", "50ms", "--crs", "0.01", "--compressors", "topk", "--json"];
        let costs = json(&on_network(&[&args[..], steps].concat()))["costs"].clone();
        let topk = costs.as_array().unwrap().iter().find(|row| row["compressor"] != "none").unwrap().clone();
        topk["t_quality_s"].as_f64().unwrap()
    };
    let measured = seconds(&[]);
    assert!((seconds(&["--steps", "500"]) - measured).abs() < 1e-12);
    assert!(seconds(&["--steps", "100"]) > 1.2 * measured && seconds(&["--steps", "100000"]) < 0.9 * measured);
    refused_on_network(&["--params", "25M", "--steps", "100", "--exponent", "0.1"], &["--steps", "--exponent"]);
    refused_on_network(&["--params", "25M", "--steps", "100", "--policy", "knee"], &["time-to-quality", "knee"]);
}

#[test]
fn biased_compressors_without_error_feedback_are_refused_with_the_remedy() {
    let words = ["topk(k=*)", "biased", "topk(k=*)+ef(vanilla)", "--biased-without-memory"];
    refused_on_network(&["--params", "25M", "--compressors", "fp16,topk(k=*)"], &words);
    refused_on_network(&["--params", "25M", "--compressors", "topk(k=0.01)"], &["Write topk(k=0.01)+ef(vanilla)"]);
    let rows = |list: &str, more: &[&str]| {
        let args = ["--params", "25M", "--compute", "50ms", "--crs", "0.01", "--json", "--compressors", list];
        json(&on_network(&[&args[..], more].concat()))["costs"].as_array().unwrap().clone()
    };
    let sparse = |c: &&serde_json::Value| c["collective"] == "allgather";
    let steps = |row: &serde_json::Value| row["t_quality_s"].as_f64().unwrap() / row["t_step_s"].as_f64().unwrap();
    let lost = rows("topk(k=*)", &["--biased-without-memory"]);
    let lost = lost.iter().find(sparse).unwrap();
    assert!((steps(lost) * lost["gain"].as_f64().unwrap() - 1.0).abs() < 1e-9, "all that is not sent: {lost}");
    // Unbiased ones need no key, and pay for their variance: of eight workers an eighth.
    let noisy = rows("qsgd(s=4)", &[]);
    let noisy = noisy.iter().find(sparse).unwrap();
    let variance = noisy["variance"].as_f64().unwrap();
    assert!((variance * 8.0 - 3.51).abs() < 0.01 && (steps(noisy) - 1.0 - variance).abs() < 1e-9, "{noisy}");
    let of_one = 1.0 / noisy["gain"].as_f64().unwrap() - 1.0;
    assert!((of_one - 8.0 * variance).abs() < 1e-9, "1/(1 + ω): {noisy}");
    let told = text(&on_network(&["--params", "25M", "--compressors", "qsgd(s=4),qsgd(s=4)+ef(vanilla),fp16"]));
    assert!(
        told.contains("qsgd(s=4) (no ef)") && told.contains("qsgd(s=4)  ") && !told.contains("fp16 (no ef)"),
        "{told}"
    );
    assert!(told.contains("qsgd(s=4) adds the variance"), "{told}");
}

/// What a user gets who names no compressors: everything that competes by default, each row with a text that `attach` takes.
#[test]
fn by_default_all_candidates_compete() {
    let output = Command::new(env!("CARGO_BIN_EXE_flexcomm"))
        .args(["plan", "--params", "25.56M", "--compute", "100ms", "--json"])
        .args(NETWORK)
        .output()
        .unwrap();
    let answer = json(&output);
    let costs = answer["costs"].as_array().unwrap();
    let strategies: Vec<flexcomm_domain::Strategy> =
        costs.iter().map(|c| c["strategy"].as_str().unwrap().parse().unwrap()).collect();
    // Dense and what adds up by each allreduce; all else by allgather, and what selects values under two selections by each way of
    // AR-Topk, too; at five ratios where there is one.
    let rows = |family: &Family| {
        let ratios = if family.has_ratio() { 5 } else { 1 };
        match (family.any().travels(), family.any().selects()) {
            (Travels::Sums(_), _) => ratios * by(Pattern::Allreduce),
            (Travels::Gathers, false) => ratios * by(Pattern::Allgather),
            (Travels::Gathers, true) => ratios * (by(Pattern::Allgather) + 2 * by(Pattern::ArTopk)),
        }
    };
    let mut count = 0;
    for family in flexcomm_domain::default_compressors().into_iter().chain([Family::NONE]) {
        let found = strategies.iter().filter(|s| s.family() == family).count();
        assert_eq!(found, rows(&family), "{family}");
        count += found;
    }
    assert_eq!(strategies.len(), count);
    let sync = |text: &str| {
        let row = costs.iter().find(|c| c["strategy"] == text).unwrap_or_else(|| panic!("{text}"));
        row["t_sync_s"].as_f64().unwrap()
    };
    // A ring of 14 latencies: half the bytes are half the rest; PowerSGD's two factors are two rings.
    let (dense, half) = (sync("none/dense-ring") - 0.014, sync("fp16/dense-ring") - 0.014);
    assert!((dense / half - 2.0).abs() < 1e-6, "{dense} {half}");
    assert!(sync("powersgd(rank=2)+ef(vanilla)/dense-ring") > 0.028);
}

#[test]
fn compressors_are_named_shortly_or_with_their_parameters() {
    let answer =
        json(&on_network(&["--params", "1M", "--compressors", "powersgd,qsgd(s=15,norm=max)+ef(vanilla)", "--json"]));
    let names: Vec<String> =
        answer["costs"].as_array().unwrap().iter().map(|c| c["strategy"].as_str().unwrap().to_owned()).collect();
    assert_eq!(names.len(), (1 + 3) * by(Pattern::Allreduce) + 1, "{names:?}");
    assert_eq!(names.last().unwrap(), "qsgd(s=15,norm=max)+ef(vanilla)/allgather");
    let shown = text(&on_network(&["--params", "1M", "--compressors", "topk(k=*)+ef(dgc,mu=0.9)", "--crs", "0.1"]));
    assert!(shown.contains("topk+ef(dgc,mu=0.9) at 0.1"), "{shown}");
    // Five rows of 0.01 of the values, and the kept values themselves: not 4 bytes a kept value alone.
    let answer = json(&on_network(&["--params", "1M", "--compressors", "sketched", "--crs", "0.001", "--json"]));
    let row = "sketched(k=0.001)+ef(vanilla)/dense-ring";
    let row = answer["costs"].as_array().unwrap().iter().find(|c| c["strategy"] == row).unwrap();
    let bandwidth_s = row["t_sync_s"].as_f64().unwrap() - 2.0 * 14.0 * 0.001;
    assert!(bandwidth_s > 14.0 / 8.0 * 5.0 * 0.01 * 4e6 * 8.0 / 10e9, "{row}");
    refused_on_network(&["--params", "1M", "--compressors", "topkk"], &["did you mean topk?"]);
    refused_on_network(&["--params", "1M", "--compressors", "qsgd(s=0)"], &["s of qsgd", "1 to 127"]);
    let with_memory = ["none+ef(vanilla) compresses nothing", "dense is always a candidate"];
    refused_on_network(&["--params", "1M", "--compressors", "none+ef(vanilla)"], &with_memory);
    refused_on_network(&["--params", "1M", "--compressors", "fp16,none+nesterov(mu=0.9)"], &["compresses nothing"]);
    let collective = ["at \"/allgather\", expected a compressor alone, without a collective"];
    refused_on_network(&["--params", "1M", "--compressors", "fp16/allgather"], &collective);
}

/// Half the bits of a value are half its bytes, whatever its index costs.
#[test]
fn kept_values_cost_what_their_type_says() {
    let bytes = |values: &str| {
        let compressor = format!("topk(k=*)+ef(vanilla){values}");
        let args = ["--params", "1M", "--crs", "0.01", "--compressors", &compressor, "--json"];
        let answer = json(&on_network(&args));
        let gathered = answer["costs"].as_array().unwrap().iter().find(|c| c["collective"] == "allgather").unwrap();
        // Three latencies, and seven messages at 0.8 ns per byte.
        (gathered["t_sync_s"].as_f64().unwrap() - 0.003) / (7.0 * 0.8e-9)
    };
    // Header, k, and the set: 10,000 indices of 6 low bits and 25,626 upper ones.
    let rest = 44.0 + 1.0 + 7_500.0 + 3_204.0;
    for (values, each, off) in [("", 4.0, 0.0), ("+values(bf16)", 2.0, 0.0), ("+values(int8)", 1.0 + 4.0 / 256.0, 4.0)]
    {
        let found = bytes(values);
        assert!((found - rest - 10_000.0 * each).abs() <= off + 1e-3, "{values}: {found}");
    }
}

/// Just above its break-even gain a ratio is chosen, just below it is not; the file's gains are those of ranks that select for themselves.
#[test]
fn a_gain_above_the_break_even_beats_dense() {
    // Two workers, of whom allgather asks no more than AR-Topk does.
    let network = ["--workers", "2", "--latency", "1ms", "--bandwidth", "1gbit"];
    let base = ["--params", "25.56M", "--compute", "50ms", "--crs", "0.1", "--exponent", "1"];
    let run = |more: &[&str]| run(&[&network[..], &base, more].concat());
    let answer = json(&run(&["--json"]));
    let costs = answer["costs"].as_array().unwrap();
    let least = |rows: &dyn Fn(&&serde_json::Value) -> bool, key: &str| {
        costs.iter().filter(rows).filter_map(|c| c[key].as_f64()).fold(f64::MAX, f64::min)
    };
    let gathered = |c: &&serde_json::Value| c["collective"] == "allgather";
    let even = least(&gathered, "break_even_gain");
    let times = least(&gathered, "t_step_s") / least(&|c| c["cr"] == 1.0, "t_step_s");
    assert!((even - times).abs() < 1e-12 && even < 0.99, "{even} {times}");
    assert_eq!(least(&|c| c["cr"] == 1.0, "break_even_gain"), 1.0);
    for (factor, chosen, words) in [(1.001, 0.1, "(given: "), (0.999, 1.0, "Dense is best here: compression")] {
        let (_folder, path) = file("gain.csv", &format!("cr,gain\n0.1,{}\n", even * factor));
        assert_eq!(json(&run(&["--gain", &path, "--json"]))["choice"]["cr"], chosen, "{even} x {factor}");
        let shown = text(&run(&["--gain", &path]));
        assert!(shown.contains(words) && !shown.contains("the assumed gain"), "{shown}");
    }
}

#[test]
fn neighbours_with_one_strategy_are_one_line() {
    let network = ["--workers", "8", "--latency", "100us", "--bandwidth", "1gbit"];
    let args = ["--params", "25M", "--compute", "300ms", "--buckets", "12", "--compressors", "powersgd,fp16"];
    let shown = text(&run(&[&network[..], &args].concat()));
    let runs = shown.lines().skip_while(|line| !line.trim_start().starts_with("buckets ")).skip(1);
    let runs: Vec<Vec<&str>> =
        runs.map(|line| line.split_whitespace().collect()).take_while(|l: &Vec<_>| !l.is_empty()).collect();
    assert!((2..12).contains(&runs.len()) && runs.windows(2).all(|pair| pair[0][2] != pair[1][2]), "{shown}");
    assert_eq!(runs.iter().map(|run| run[1].parse::<u64>().unwrap()).sum::<u64>(), 25_000_000);
    assert!(
        shown.contains("A strategy for each bucket, by NSGA-II (seed 1") && shown.contains("\nChoice: "),
        "{shown}"
    );
}

/// The README's own example has its compute time; without one the answer names the compute time that overturns it.
#[test]
fn without_a_compute_time_the_answer_says_from_which_on_dense_is_best() {
    let readme = concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md");
    let readme = std::fs::read_to_string(readme).unwrap();
    let example = readme.lines().find_map(|line| line.strip_prefix("flexcomm plan ")).unwrap();
    let words: Vec<&str> = example.split_whitespace().chain(["--json"]).collect();
    let answer = json(&run(&words));
    assert!(!answer["assumed"].to_string().contains("--compute"), "{example}: {answer}");
    assert_eq!(answer["choice"]["cr"], 1.0, "{example}");

    let at = words.iter().position(|word| *word == "--compute").unwrap();
    let answer = json(&run(&[&words[..at], &words[at + 2..]].concat()));
    assert_ne!(answer["choice"]["compressor"], "none");
    assert!(answer["assumed"].to_string().contains("or more, dense is best: give --compute"), "{answer}");
    let fast = ["--params", "25.56M", "--workers", "8", "--latency", "10us", "--bandwidth", "400gbit", "--json"];
    let answer = json(&run(&fast));
    assert_eq!(answer["choice"]["compressor"], "none");
    assert!(answer["assumed"].to_string().contains("with any, dense is best all the more"), "{answer}");
    let slower = ["--params", "25.56M", "--workers", "8", "--latency", "1ms", "--bandwidth", "5gbit"];
    let bare = [&slower[..], &["--compressors", "topk", "--json"]].concat();
    let answer = json(&run(&bare));
    assert!(answer["choice"]["cr"].as_f64().unwrap() < 1.0);
    let all = answer["assumed"].as_array().unwrap();
    let assumed = all.iter().filter_map(|a| a.as_str()).find(|a| a.contains("no --compute")).unwrap();
    let from = assumed.split_once("backward pass takes ").and_then(|(_, rest)| rest.split_once(" ms or more, dense"));
    let from: f64 = from.unwrap_or_else(|| panic!("{assumed}")).0.parse().unwrap();
    for (factor, is_dense) in [(0.9, false), (1.0, true), (1.5, true)] {
        let compute = format!("{}ms", factor * from);
        let chosen = json(&run(&[&bare[..], &["--compute", &compute]].concat()))["choice"]["cr"].as_f64().unwrap();
        assert_eq!(chosen == 1.0, is_dense, "at {compute} of {assumed}");
    }
    // Dense without any compute time: no threshold, and no advice to look for one.
    let fast = ["--params", "1M", "--workers", "8", "--latency", "1us", "--bandwidth", "400gbit"];
    let dense = text(&run(&fast));
    assert!(
        dense.contains("with any, dense is best all the more") && dense.contains("Choice: dense by dense-"),
        "{dense}"
    );
}

#[test]
fn one_worker_is_dense_and_only_that_is_listed() {
    let args = ["--params", "1M", "--workers", "1", "--latency", "1ms", "--bandwidth", "1gbit", "--json"];
    let answer = json(&run(&args));
    let costs = answer["costs"].as_array().unwrap();
    assert!(costs.iter().all(|c| c["cr"] == 1.0 && c["t_sync_s"] == 0.0), "{costs:?}");
    assert_eq!(costs.len(), by(Pattern::Allreduce));
    assert!(answer["assumed"].to_string().contains("one worker has nobody to send to"));
    assert_eq!(json(&run(&[&args[..], &["--buckets", "4"]].concat()))["choice"]["cr"], 1.0);
}

#[test]
fn the_same_seed_finds_the_same_plans_and_the_best_is_chosen() {
    let base = ["--params", "25.56M", "--compute", "300ms", "--json"];
    let solved = |buckets: &str, seed: &str| {
        let mut answer = json(&on_network(&[&base[..], &["--buckets", buckets, "--seed", seed]].concat()));
        answer["solver"]["seconds"].as_f64().unwrap();
        answer["solver"]["seconds"] = 0.into();
        answer
    };
    let time = |v: &serde_json::Value| v["t_quality_s"].as_f64().unwrap();
    for buckets in ["2", "24"] {
        let answer = solved(buckets, "7");
        assert_eq!(answer, solved(buckets, "7"));
        let plans = answer["solver"]["plans"].as_array().unwrap();
        let both = plans.iter().chain(answer["costs"].as_array().unwrap());
        let least = both.map(time).fold(f64::INFINITY, f64::min);
        assert!((time(&answer["choice"]) - least).abs() < 1e-9 * least, "{}", answer["choice"]);
        for plan in plans {
            let text = plan["strategy"].as_str().unwrap();
            assert!(text.parse::<Plan>().unwrap().alike().is_none() && plan["compressor"].is_null(), "{plan}");
        }
        assert_eq!(answer["costs"].as_array().unwrap().len(), by(Pattern::Allreduce) + 5 * of_topk());
    }
}

/// Backward hides the first bucket's exchange and not the last one's.
#[test]
fn what_hides_stays_nearly_dense_and_what_does_not_is_compressed() {
    let network = ["--workers", "8", "--latency", "100us", "--bandwidth", "300mbit"];
    let args = ["--params", "25M", "--compute", "1s", "--buckets", "8", "--json", "--compressors", "topk,fp16"];
    let answer = json(&run(&[&network[..], &args].concat()));
    let plan: Plan = answer["choice"]["strategy"].as_str().unwrap().parse().unwrap();
    assert!(plan.of(0).cr().get() > plan.of(7).cr().get(), "{plan}");
    let time = |v: &serde_json::Value| v["t_quality_s"].as_f64().unwrap();
    let alike = answer["costs"].as_array().unwrap().iter().map(time).fold(f64::INFINITY, f64::min);
    assert!(time(&answer["choice"]) < 0.97 * alike, "{} {alike}", answer["choice"]);
    // Less is chosen where less may be lost.
    let floor = json(&run(&[&network[..], &args, &["--gain-floor", "0.9"]].concat()));
    assert!(floor["choice"]["gain"].as_f64().unwrap() >= 0.9, "{}", floor["choice"]);
    refused(&[&network[..], &args[..6], &["--overlap", "2"]].concat(), &["--overlap", "--buckets"]);
}

/// The sentence on the assumed gain stands where the choice's gain rests on it.
#[test]
fn the_assumed_gain_is_told_where_the_choice_uses_it() {
    let slow = ["--params", "25M", "--workers", "8", "--latency", "1ms", "--bandwidth", "100mbit", "--compressors"];
    let shown = |list: &str| text(&run(&[&slow[..], &[list]].concat()));
    let holds = "This holds under the assumed gain c^0.6";
    assert!(shown("topk").contains(holds));
    let fp16 = shown("fp16");
    assert!(fp16.contains("Choice: fp16") && !fp16.contains("c^0.6"), "{fp16}");
    assert!(shown("fp16,topk(k=0.1)+ef(vanilla)").contains("Assumed: gain(c) = c^0.6"));
}

/// AR-Topk's ranks decompress one sum each, not every rank's message: also where the gradient is one bucket.
#[test]
fn one_bucket_costs_what_the_whole_gradient_does() {
    let rows = |more: &[&str]| -> Vec<(String, f64, f64)> {
        let base = ["--params", "25.56M", "--compressors", "topk", "--json"];
        let answer = json(&on_network(&[&base[..], more].concat()));
        let row = |c: &serde_json::Value| {
            let number = |key: &str| c[key].as_f64().unwrap();
            (c["strategy"].as_str().unwrap().to_owned(), number("t_comp_s"), number("t_sync_s"))
        };
        answer["costs"].as_array().unwrap().iter().map(row).collect()
    };
    let (whole, bucket) = (rows(&[]), rows(&["--buckets", "1"]));
    assert_eq!(bucket.len(), whole.len());
    for (strategy, t_comp, t_sync) in bucket {
        let same = whole.iter().find(|row| row.0 == strategy).unwrap_or_else(|| panic!("{strategy} is missing"));
        assert!((t_comp - same.1).abs() <= 1e-6 * same.1, "{strategy}: {t_comp} for {same:?}");
        assert!((t_sync - same.2).abs() <= 1e-6 * same.2, "{strategy}: {t_sync} for {same:?}");
    }
}

/// What has no profile takes its own time in each bucket, not a share of top-k's.
#[test]
fn equal_buckets_take_as_long_to_compress_as_the_whole_gradient() {
    for compressor in ["adaptive(k=*)", "randomk(k=*,scaled=true,shared=false)"] {
        let rows = |more: &[&str]| {
            let base = ["--params", "25M", "--compressors", compressor, "--json"];
            let answer = json(&on_network(&[&base[..], more].concat()));
            let row =
                |c: &serde_json::Value| (c["strategy"].as_str().unwrap().to_owned(), c["t_comp_s"].as_f64().unwrap());
            answer["costs"].as_array().unwrap().iter().map(row).collect::<std::collections::BTreeMap<_, _>>()
        };
        let (whole, buckets) = (rows(&[]), rows(&["--buckets", "10"]));
        assert!(whole.len() > by(Pattern::Allreduce) && whole.keys().eq(buckets.keys()), "{whole:?} {buckets:?}");
        for (strategy, t_comp) in whole {
            assert!(
                (buckets[&strategy] - t_comp).abs() <= 1e-9 * t_comp,
                "{strategy}: {} for {t_comp}",
                buckets[&strategy]
            );
        }
    }
}

#[test]
fn buckets_with_more_energy_keep_more() {
    let network = ["--workers", "8", "--latency", "100us", "--bandwidth", "1gbit", "--compressors", "topk"];
    let rows: String = (0..20).map(|i| format!("layer{i},1M,{}\n", if i % 2 == 0 { 10 } else { 1 })).collect();
    let (_folder, path) = file("buckets.csv", &format!("bucket,params,energy\n{rows}"));
    let args = ["--buckets", &path, "--compute", "20ms"];
    let energies = |energies: [&str; 2]| {
        let rows = format!("bucket,params,energy\na,10M,{}\nb,10M,{}\n", energies[0], energies[1]);
        let (_folder, path) = file("buckets.csv", &rows);
        let answer = json(&run(&[&network[..], &["--buckets", &path, "--compute", "1ms", "--json"]].concat()));
        let plans = answer["solver"]["plans"].as_array().unwrap();
        plans[0]["strategy"].as_str().unwrap().parse::<Plan>().unwrap()
    };
    for (given, more, less) in [(["100", "1"], 0, 1), (["1", "100"], 1, 0)] {
        let plan = energies(given);
        assert!(plan.of(more).cr().get() > plan.of(less).cr().get(), "{given:?}: {plan}");
    }
    let shown = text(&run(&[&network[..], &args].concat()));
    assert!(shown.contains("layer19") && !shown.contains("give energy per bucket"), "{shown}");
}

#[test]
fn gains_that_contradict_themselves_are_used_and_told() {
    let (_folder, path) = file("gain.csv", "cr,gain\n0.1,0.5\n0.01,0.7\n0.001,0.2\n");
    let answer = json(&on_network(&["--params", "1M", "--crs", "0.1,0.01", "--gain", &path, "--json"]));
    let told = answer["assumed"].to_string();
    assert!(told.contains("gain falls from 0.7 at CR 0.01 to 0.5 at CR 0.1"), "{told}");
    assert!(told.contains("0.6000 and 0.6000 are used"), "{told}");
    let (_folder, twice) = file("gain.csv", "cr,gain\n0.1,0.5\n0.1,0.7\n1,0.9\n");
    let told = json(&on_network(&["--params", "1M", "--gain", &twice, "--json"]))["assumed"].to_string();
    assert!(told.contains("CR 0.1 comes twice") && told.contains("dense keeps everything, not 0.9"), "{told}");
    let (_folder, fine) = file("gain.csv", "cr,gain,t_comp_s\n0.1,0.7,0.001\n0.01,0.5,0.001\n");
    let answer = json(&on_network(&["--params", "1M", "--compute", "1ms", "--gain", &fine, "--json"]));
    let told = answer["assumed"].as_array().unwrap();
    assert!(told.len() == 1 && told[0].as_str().unwrap().starts_with("art-ring and art-tree keep"), "{told:?}");
}

/// A k in a compressor's text is its only ratio; a text without k, or with `k=*`, competes at those of --crs.
#[test]
fn a_k_in_the_text_is_the_only_ratio_of_that_compressor() {
    let crs = |list: &str, more: &[&str]| -> Vec<(String, f64)> {
        let args = ["--params", "25M", "--crs", "0.1,0.001", "--compressors", list, "--json"];
        let answer = json(&on_network(&[&args[..], more].concat()));
        let rows = answer["costs"].as_array().unwrap().iter().filter(|row| row["collective"] == "allgather");
        rows.map(|row| (row["compressor"].as_str().unwrap().to_owned(), row["cr"].as_f64().unwrap())).collect()
    };
    let of = |name: &str, all: &[f64]| all.iter().map(|cr| (name.to_owned(), *cr)).collect::<Vec<_>>();
    assert_eq!(crs("topk(k=0.01)+ef(vanilla)", &[]), of("topk", &[0.01]));
    for open in ["topk", "topk(k=*)+ef(vanilla)", "topk+ef(vanilla)"] {
        assert_eq!(crs(open, &[]), of("topk", &[0.1, 0.001]), "{open}");
    }
    let both = crs("topk(0.02)+ef(vanilla),mstopk,topk(k=0.03)+ef(vanilla)", &[]);
    assert_eq!(both, [of("topk", &[0.02, 0.03]), of("mstopk", &[0.1, 0.001])].concat());
    assert_eq!(crs("topk(k=0.01)+ef(vanilla)", &["--buckets", "2"]), of("topk", &[0.01]));
    let answer = json(&on_network(&["--params", "25M", "--compressors", "topk(k=0.01)+ef(vanilla)", "--json"]));
    let dense = answer["costs"].as_array().unwrap().iter().filter(|row| row["compressor"] == "none").count();
    assert_eq!(dense, by(Pattern::Allreduce), "dense is there once");
    refused_on_network(
        &["--params", "1M", "--compressors", "topk(k=1e-300)+ef(vanilla)"],
        &["allowed is 1e-9 to below 1"],
    );
}

/// As often as it is named, a ratio is one.
#[test]
fn ratios_count_once() {
    let crs = vec!["0.1"; 70].join(",");
    let own = vec!["topk(k=0.01)+ef(vanilla)"; 70].join(",");
    let args = ["--params", "25M", "--compressors", &own, "--json"];
    assert!(!json(&on_network(&args))["costs"].as_array().unwrap().is_empty());
    let args = ["--params", "25M", "--crs", &crs, "--json"];
    assert_eq!(json(&on_network(&args))["costs"].as_array().unwrap().len(), by(Pattern::Allreduce) + of_topk());
}

/// What is sent of such compressors is known afterwards only.
#[test]
fn a_size_that_is_a_bound_is_told_of_its_compressors() {
    let told =
        |list: &str| json(&on_network(&["--params", "25M", "--compressors", list, "--json"]))["assumed"].to_string();
    let some = told("threelc,topk,inceptionn,adaptive");
    assert!(some.contains("priced, of threelc+ef(vanilla), inceptionn+ef(vanilla), adaptive(k=*)\""), "{some}");
    assert!(!told("topk,fp16,qsgd,powersgd").contains("priced, of"));
    assert!(
        text(&on_network(&["--params", "25M", "--compressors", "sketchml"]))
            .contains("priced, of sketchml+ef(vanilla).")
    );
}

/// An alias is the name that it stands for; errors are about what was typed.
#[test]
fn names_in_compressors_are_read_alike_whatever_they_are() {
    let strategies = |list: &str| {
        let answer = json(&on_network(&["--params", "25M", "--compressors", list, "--json"]));
        answer["costs"].as_array().unwrap().iter().map(|row| row["strategy"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(strategies("u8bit"), strategies("eightbit"));
    assert!(strategies("adaq").contains(&"adaptivethreshold(k=0.1)+ef(vanilla)/allgather".into()));
    assert!(strategies("efsignsgd").contains(&"efsignsgd+ef(vanilla)/allgather".into()));
    refused_on_network(&["--params", "1M", "--compressors", "topk@0.01"], &["topk@0.01", ": topk(k=0.01)+ef(vanilla)"]);
    assert_eq!(strategies("dense,fp16"), strategies("fp16"), "dense is a candidate anyway");
    assert_eq!(strategies("none").len(), by(Pattern::Allreduce));
    let output = on_network(&["--params", "1M", "--compressors", "dithering(partition=natural)"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        said.contains("without k: it must be given, a whole number from 1 to 127") && !said.contains("0.5"),
        "{said}"
    );
}

/// What --help lists as the default can be pasted behind --compressors.
#[test]
fn the_default_compressors_of_the_help_can_be_pasted() {
    let help = text(&Command::new(env!("CARGO_BIN_EXE_flexcomm")).args(["plan", "--help"]).output().unwrap());
    let list = help.split_once("Without it all").unwrap().1.split('\'').nth(1).unwrap();
    assert!(!list.contains(char::is_whitespace), "{list:?}");
    let costs = |more: &[&str]| {
        let args = [&["plan", "--params", "25M", "--json"], &NETWORK[..], more].concat();
        json(&Command::new(env!("CARGO_BIN_EXE_flexcomm")).args(args).output().unwrap())["costs"].clone()
    };
    assert_eq!(costs(&["--compressors", list]), costs(&[]));
}

/// What `bench compressors --json` printed is what a plan reckons with.
#[test]
fn times_come_from_a_bench() {
    let table =
        r#"[{"method":"topk(k=0.1)+ef(vanilla)","n":1000000,"compress_s":0.002,"decompress_s":0.0001,"gain":1}]"#;
    let (_folder, path) = file("times.json", table);
    let answer = json(&on_network(&["--params", "1M", "--crs", "0.1", "--times", &path, "--json"]));
    let t_comp = |collective: &str| {
        let row = answer["costs"].as_array().unwrap().iter().find(|row| row["collective"] == collective).unwrap();
        row["t_comp_s"].as_f64().unwrap()
    };
    // Of eight messages that are gathered, and of one sum.
    assert!((t_comp("allgather") - 0.0028).abs() < 1e-12 && (t_comp("art-ring") - 0.0021).abs() < 1e-12, "{answer}");
    assert!(!answer["assumed"].to_string().contains("--times"), "{answer}");
    let told = json(&on_network(&["--params", "1M", "--json"]))["assumed"].to_string();
    assert!(told.contains("one core of a server CPU: give --times"), "{told}");
    for (content, words) in [
        ("", "bench compressors --json"),
        ("[]", "no row has times"),
        (r#"[{"method":"topkk","n":1,"compress_s":0,"decompress_s":0}]"#, "did you mean topk?"),
        (r#"[{"method":"fp16","n":1,"compress_s":-1,"decompress_s":0}]"#, "compress_s of fp16 is -1"),
    ] {
        let (_folder, path) = file("times.json", content);
        refused_on_network(&["--params", "1M", "--times", &path], &["times.json", words]);
    }
}

#[test]
fn bad_numbers_are_refused_by_name() {
    for (params, words) in [
        ("1e300", &[": 1e300 values, allowed are 1 to 1e14"][..]),
        ("NaN", &["\"NaN\" is not a count"]),
        ("-5", &[": -5 values, allowed are 1 to 1e14"]),
        ("0", &[": 0 values"]),
        ("-5k", &["-5k is -5e3 values"]),
        ("inf", &["inf values"]),
        ("25X", &["\"25X\" is not a count"]),
        ("", &["is not a count"]),
    ] {
        refused_on_network(&["--params", params], words);
    }
    for (flag, value, words) in [
        ("--crs", "0.1,1.5", "compression ratio is 1.5, allowed is above 0, at most 1"),
        ("--crs", "0", "compression ratio is 0"),
        ("--crs", "-0.1", "compression ratio is -0.1"),
        ("--crs", "NaN", "compression ratio is NaN"),
        ("--crs", "1", "1 is dense, which is always a candidate"),
        ("--crs", "0.1,1e-300", "compression ratio is 1e-300, allowed is 1e-9 to below 1"),
        ("--compute", "1e300s", "duration in seconds is 1e300, allowed is 0 to 31,536,000"),
        ("--compute", "-1ms", "-1ms"),
        ("--compute", "nans", "nans"),
        ("--overlap", "0.5", "overlap"),
        ("--gain-floor", "2", "gain floor"),
        ("--exponent", "1.5", "exponent"),
        ("--steps", "0", "steps"),
        ("--steps", "many", "steps"),
        ("--policy", "best", "best"),
        ("--buckets", "0", "--buckets is 0, allowed are 1 to 60"),
        ("--buckets", "61", "--buckets is 61"),
        ("--buckets", "-3", "--buckets is -3"),
        ("--buckets", "2.5", "--buckets is 2.5"),
        ("--buckets", "NaN", "--buckets is NaN"),
        ("--buckets", "/nonexistent/b.csv", "failed to read /nonexistent/b.csv"),
    ] {
        refused_on_network(&["--params", "1M", flag, value], &[words]);
        let status = on_network(&["--params", "1M", flag, value]).status.code();
        assert_eq!(status, Some(if value.starts_with('/') { 1 } else { 2 }), "{flag} {value}");
    }
    let network = |n, alpha, rate| ["--params", "1M", "--workers", n, "--latency", alpha, "--bandwidth", rate];
    refused(&network("0", "1ms", "1gbit"), &["0 is not in 1..=4096"]);
    refused(&network("-8", "1ms", "1gbit"), &["-8"]);
    refused(&network("5000", "1ms", "1gbit"), &["4096"]);
    refused(&network("8", "-1ms", "1gbit"), &["-1ms"]);
    refused(&network("8", "1", "1gbit"), &["a number with a unit"]);
    refused(&network("8", "1ms", "0gbit"), &["bandwidth in bit/s is 0"]);
    refused(&network("8", "1ms", "nangbit"), &["nangbit"]);
    refused(&network("8", "1ms", "1e-300bit"), &["bandwidth in bit/s is 1e-300, allowed is 1e3 to 1e14"]);
    refused(&NETWORK, &["--params"]);
    refused_on_network(&["--buckets", "4"], &["--params"]);
}

#[test]
fn bad_files_are_refused_with_line_and_value() {
    for (flag, content, words) in [
        ("--gain", "", &["it is empty"][..]),
        ("--gain", "cr,gain\n0.1,0.8\n\n0.01,NaN\n", &["line 4", "gain is NaN"]),
        ("--gain", "cr,gain\n0.1,-0.8\n", &["line 2", "gain is -0.8"]),
        ("--gain", "cr,gain\n1.5,0.8\n", &["line 2", "compression ratio is 1.5"]),
        ("--gain", "cr,gain,t_comp_s\n0.1,0.8,-1\n", &["line 2", "-1"]),
        ("--buckets", "bucket,size\na,1\n", &["line 1", "expected bucket,params"]),
        ("--buckets", "bucket,params\na,1k\nb,0\n", &["line 3", "0 values"]),
        ("--buckets", "bucket,params,energy\na,1k,NaN\n", &["line 2", "energy \"NaN\""]),
        ("--buckets", "bucket,params,gain_exponent\na,1k,2\n", &["line 1", "expected bucket,params[,energy]"]),
        ("--buckets", "bucket,params,energy\na,1k,2\nb,1k,\n", &["1 of 2 buckets have an energy"]),
        ("--buckets", "bucket,params\na,1k,3\n", &["line 2", "3 cells, expected 2"]),
        ("--buckets", "bucket,params\n", &["0 buckets"]),
        ("--buckets", "bucket,params\na,1k\n", &["--params is 1000000 but the buckets", "1000 values"]),
    ] {
        let (_folder, path) = file("input.csv", content);
        refused_on_network(&["--params", "1M", flag, &path], &[words, &["input.csv"]].concat());
    }
    for (content, words) in [
        ("-,1ms/1gbit\n", &["line 1", "2 cells, expected 1"][..]),
        ("-,1ms/1gbit\n1ms/1gbit,-\n1ms/1gbit,1ms/1gbit\n", &["line 1", "2 cells, expected 3"]),
        ("-,1ms/1gbit\n-1ms/1gbit,-\n", &["line 2, cell 1", "-1ms/1gbit"]),
        ("-,1ms/nan\n1ms/1gbit,-\n", &["line 1, cell 2"]),
        ("", &["it is empty"]),
    ] {
        let (_folder, path) = file("links.csv", content);
        refused(&["--params", "1M", "--links", &path], &[words, &["links.csv"]].concat());
    }
    let (_folder, square) = file("links.csv", "-,1ms/1gbit\n1ms/1gbit,-\n");
    refused(&["--params", "1M", "--workers", "3", "--links", &square], &["--workers is 3", "links of 2 workers"]);
    let not_text = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(not_text.path(), [0xff, 0xfe, 0x00]).unwrap();
    refused(&["--params", "1M", "--links", not_text.path().to_str().unwrap()], &["failed to read", "UTF-8"]);
}
