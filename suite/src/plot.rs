//! Charts of a summary and of a cell as SVG.

use crate::adaptive::Switch;
use crate::baselines::{Adapted, Line, Record};
use crate::chart::{Axis, BOTTOM, LEFT, RIGHT, Scale, Svg, TOP, WIDTH, cut};
use crate::fixed::DENSE;
use crate::score;
use crate::summary::{Group, Method, PHASE_BANDS, phase_band};

const ROW: f64 = 15.0;
/// Of a chart of lines, without its margins.
const HEIGHT: f64 = 360.0;
/// Characters of a name that have space at the left.
const NAME: usize = 25;

fn colour(who: Method) -> &'static str {
    match who {
        Method::Flexcomm => "#c0392b",
        Method::Oracle => "#27803b",
        Method::Random => "#8e8e8e",
        Method::BestAverageFixed => "#2c5fa8",
        Method::RecordedPlanner => "#b8860b",
    }
}

/// Seconds to the target over those of the best fixed setting, by group, with intervals.
pub fn groups(title: &str, groups: &[Group]) -> String {
    let rows: usize = groups.iter().map(|group| group.compared.len() + 1).sum();
    let bottom = TOP + ROW * rows as f64;
    let mut svg = Svg::new(title, bottom + BOTTOM);
    let all = || groups.iter().flat_map(|group| &group.compared);
    let values = all().flat_map(|c| [c.interval.low, c.interval.high, c.geomean, 0.9, 1.1]);
    let axis = Axis::of(values, LEFT, WIDTH - RIGHT, Scale::Logarithmic);
    let shown = Method::ALL.into_iter().filter(|who| all().any(|c| c.who == *who));
    svg.legend(LEFT, shown.map(|who| (who.name(), colour(who))));
    svg.horizontal(&axis, (TOP - 10.0, bottom), "seconds to the target / the best fixed setting's");
    svg.line((axis.at(1.0), TOP - 10.0), (axis.at(1.0), bottom), "#555", 1.0);
    let mut y = TOP;
    for group in groups {
        let middle = y + ROW * (group.compared.len() as f64 - 1.0) / 2.0 + 4.0;
        svg.label(LEFT - 12.0, middle, "end", "black", &format!("{} ({})", cut(&group.name, NAME - 5), group.cells));
        for compared in &group.compared {
            let colour = colour(compared.who);
            svg.line((axis.at(compared.interval.low), y), (axis.at(compared.interval.high), y), colour, 2.0);
            svg.dot((axis.at(compared.geomean), y), 4.0, colour, &format!("{:.2}", compared.geomean));
            y += ROW;
        }
        y += ROW;
    }
    svg.end()
}

/// Flexcomm's runs without an error.
fn runs(record: &Record) -> impl Iterator<Item = &Adapted> {
    record.runs().filter(|run| run.error.is_none())
}

/// What flexcomm's runs spent on experiments, of the time to the target, in the mean of each cell's runs.
pub fn experiments(records: &[Record]) -> String {
    struct Spent {
        live: f64,
        shadow: f64,
    }
    let of = |record: &Record| {
        let shares = record.live_and_shadow();
        let mean = |part: fn(&(f64, f64)) -> f64| shares.iter().map(part).sum::<f64>() / shares.len().max(1) as f64;
        Spent { live: mean(|share| share.0), shadow: mean(|share| share.1) }
    };
    let mut rows: Vec<(&Record, Spent)> = records.iter().map(|record| (record, of(record))).collect();
    rows.sort_by(|(a, _), (b, _)| (&a.cell.family, &a.name).cmp(&(&b.cell.family, &b.name)));
    let bottom = TOP + ROW * rows.len() as f64 + 4.0;
    let mut svg = Svg::new("What flexcomm spent on experiments", bottom + BOTTOM);
    let most = rows.iter().map(|(_, spent)| spent.live + spent.shadow).chain([0.1, 0.0]);
    let axis = Axis::of(most, LEFT, WIDTH - RIGHT, Scale::Percent);
    let (live, shadow) = ("#c0392b", "#e7b4a0");
    svg.legend(LEFT, [("live trials", live), ("what shadow trials made steps longer by", shadow)]);
    svg.horizontal(&axis, (TOP - 6.0, bottom), "of the time to the target, in the mean of a cell's runs");
    for ((record, spent), y) in rows.iter().zip((0..).map(|number| TOP + ROW * f64::from(number))) {
        svg.label(LEFT - 8.0, y + 10.0, "end", "black", &cut(&record.name, NAME));
        let (first, second) = (axis.at(spent.live), axis.at(spent.live + spent.shadow));
        svg.bar((axis.from, y), first - axis.from, ROW - 4.0, live);
        svg.bar((first, y), second - first, ROW - 4.0, shadow);
    }
    svg.end()
}

/// Seconds from a change of the network to a better strategy: which share of the changes that asked for one was answered by then, by
/// length of phases.
pub fn reactions(records: &[Record]) -> String {
    const COLOURS: [&str; 4] = ["#c0392b", "#b8860b", "#27803b", "#2c5fa8"];
    struct Band {
        name: String,
        after_s: Vec<f64>,
        asked: usize,
        colour: &'static str,
    }
    let of = |(number, (name, colour)): (usize, (&str, &'static str))| {
        let records = records.iter().filter(|record| phase_band(record) == number);
        let reactions: Vec<_> = records.flat_map(runs).map(|run| &run.reactions).collect();
        let mut after_s: Vec<f64> = reactions.iter().flat_map(|one| &one.after_s).copied().collect();
        after_s.sort_by(f64::total_cmp);
        let asked = after_s.len() + reactions.iter().map(|one| one.missed).sum::<usize>();
        Band { name: format!("{name}: {}/{asked}", after_s.len()), after_s, asked, colour }
    };
    let bands = PHASE_BANDS.into_iter().zip(COLOURS).enumerate().map(of);
    let bands: Vec<Band> = bands.filter(|band| band.asked > 0).collect();
    let bottom = TOP + HEIGHT;
    let mut svg = Svg::new(
        "From a change of the network to a better strategy, by length of phases: answered / all",
        bottom + BOTTOM,
    );
    let times = bands.iter().flat_map(|band| &band.after_s).flat_map(|s| [s / 1.3, s * 1.3]).chain([1.0, 100.0]);
    let (left, right) = (LEFT / 2.0, WIDTH - RIGHT);
    let x = Axis::of(times, left, right, Scale::Logarithmic);
    let y = Axis::of([0.0, 1.0].into_iter(), bottom, TOP, Scale::Percent);
    svg.legend(left, bands.iter().map(|band| (band.name.as_str(), band.colour)));
    svg.horizontal(&x, (TOP, bottom), "seconds after the change");
    svg.vertical(&y, (left, right), "of changes that asked for another strategy");
    for Band { after_s, asked, colour, .. } in &bands {
        // A staircase, up to the end of the axis.
        let share = |answered: usize| y.at(answered as f64 / *asked as f64);
        let stairs = after_s.iter().enumerate().flat_map(|(n, after)| [n, n + 1].map(|n| (x.at(*after), share(n))));
        let ends = [(right, share(after_s.len()))];
        svg.polyline([(left, share(0))].into_iter().chain(stairs).chain(ends), colour);
    }
    svg.end()
}

/// Predicted and true t_sync of flexcomm's runs, as far as they count.
pub fn predictions(records: &[Record]) -> String {
    let all: Vec<(&str, f64, f64)> = records
        .iter()
        .flat_map(|record| runs(record).flat_map(|run| &run.predictions).map(|one| (record.name.as_str(), one)))
        .map(|(name, one)| (name, one.predicted_s, one.true_s))
        .filter(|(_, predicted, came)| *predicted > 0.0 && *came > 0.0)
        .collect();
    let size = HEIGHT + 140.0;
    let (left, bottom) = (LEFT / 2.0, TOP + size);
    let both = all.iter().flat_map(|(_, predicted, came)| [*predicted, *came]).flat_map(|s| [s / 1.3, s * 1.3]);
    let x = Axis::of(both.clone(), left, left + size, Scale::Logarithmic);
    let y = Axis::of(both, bottom, TOP, Scale::Logarithmic);
    let mut svg = Svg::new("Predicted and true t_sync", bottom + BOTTOM);
    svg.legend(left, [("as predicted", "#555"), ("off by a factor of 2", "#bbb")]);
    svg.horizontal(&x, (TOP, bottom), "t_sync as it came, seconds");
    svg.vertical(&y, (left, left + size), "t_sync as predicted, seconds");
    for (factor, colour) in [(0.5, "#bbb"), (1.0, "#555"), (2.0, "#bbb")] {
        // Within both axes.
        let (from, to) = (x.low.max(x.low / factor), x.high.min(x.high / factor));
        svg.line((x.at(from), y.at(factor * from)), (x.at(to), y.at(factor * to)), colour, 1.0);
    }
    for (name, predicted, came) in &all {
        let tip = format!("{name}: {predicted:.3} s predicted, {came:.3} s came");
        svg.dot((x.at(*came), y.at(*predicted)), 2.0, "#c0392b55", &tip);
    }
    let apart: Vec<f64> = all.iter().map(|(_, predicted, came)| score::apart(*predicted, *came)).collect();
    let percent = |share| score::quantile(&apart, share).map_or("-".to_owned(), |off| format!("{:.0} %", 100.0 * off));
    let texts = [
        format!("{} predictions", all.len()),
        format!("off by {} at the median,", percent(0.5)),
        format!("by {} at p95", percent(0.95)),
    ];
    for (text, line) in texts.iter().zip(1u8..) {
        svg.label(left + size + 20.0, TOP + 18.0 * f64::from(line), "start", "black", text);
    }
    svg.end()
}

/// Where another strategy comes into force, up to a moment; the first is what the run begins with.
fn changes_of_strategy(switches: &[Switch], until_s: f64) -> Vec<&Switch> {
    let mut seen = Vec::<&Switch>::new();
    for switch in switches.iter().filter(|switch| switch.at_s <= until_s) {
        if seen.last().is_none_or(|last| last.strategy != switch.strategy) {
            seen.push(switch);
        }
    }
    seen
}

/// Rows for marks at these places, so that none lies on another: of each the first that is free.
fn rows_of(places: &[f64], width: f64) -> Vec<usize> {
    let mut ends = Vec::<f64>::new();
    let mut row_of = |place: &f64| {
        let row = ends.iter().position(|end| end + width <= *place).unwrap_or(ends.len());
        ends.resize(ends.len().max(row + 1), *place);
        ends[row] = *place;
        row
    };
    places.iter().map(&mut row_of).collect()
}

/// A cell's first seed: losses over time, flexcomm's switches, and where the network changes.
pub fn timeline(record: &Record) -> String {
    /// Pixels of a number in its circle.
    const MARK: f64 = 18.0;
    /// Switches that a legend below the axis names.
    const LISTED: usize = 40;
    /// Changes of the network that are drawn.
    const MOST_CHANGES: usize = 150;
    let baselines = &record.baselines;
    let seed = record.seeds.first();
    let flexcomm = record.flexcomm.iter().find(|run| Some(&run.seed) == seed);
    let oracle = baselines.oracle.iter().find(|run| Some(&run.seed) == seed);
    let best = baselines.best_fixed().filter(|best| *best != DENSE);
    let adapted = [("oracle", oracle, "#27803b"), ("flexcomm", flexcomm, "#c0392b")];
    let fixed = [(Some(DENSE), "#555555"), (best, "#2c5fa8")];
    let mut lines: Vec<(&str, &Line, &str)> =
        fixed.into_iter().filter_map(|(name, colour)| Some((name?, baselines.lines.get(name?)?, colour))).collect();
    lines.extend(adapted.into_iter().filter_map(|(name, run, colour)| Some((name, &run?.line, colour))));

    // What comes after the last of them has reached the target would take most of the picture.
    let target = seed.and_then(|seed| baselines.measure(*seed)).map(|measure| measure.target);
    let reached = |line: &Line| {
        let place = line.losses.iter().position(|loss| target.is_some_and(|target| *loss <= target));
        place.map_or(line.at_s.last(), |place| line.at_s.get(place)).copied()
    };
    let end_s = 1.1 * lines.iter().filter_map(|(_, line, _)| reached(line)).fold(0.0, f64::max);
    let points = |line: &Line| -> Vec<(f64, f64)> {
        let points = line.at_s.iter().copied().zip(line.losses.iter().copied());
        points.take_while(|(at_s, _)| *at_s <= end_s).collect()
    };
    let lines: Vec<_> = lines.into_iter().map(|(name, line, colour)| (name, points(line), colour)).collect();

    let (left, right, bottom) = (LEFT / 2.0, WIDTH - RIGHT, TOP + HEIGHT);
    let all = || lines.iter().flat_map(|(_, points, _)| points);
    let x = Axis::of(all().map(|(at_s, _)| *at_s), left, right, Scale::Linear);
    let y = Axis::of(all().map(|(_, loss)| *loss), bottom, TOP, Scale::Logarithmic);
    // As far as its losses go.
    let until_s = flexcomm.and_then(|run| run.line.at_s.last()).map_or(x.high, |end| end.min(x.high));
    let mut switches = changes_of_strategy(flexcomm.map_or(&[], |run| &run.switches), until_s);
    let more = switches.len().saturating_sub(LISTED);
    switches.truncate(LISTED);
    let places: Vec<f64> = switches.iter().map(|switch| x.at(switch.at_s)).collect();
    let rows = rows_of(&places, MARK);
    // Marks stand between the picture and its numbers, what they mean beneath in two columns.
    let ground = bottom + MARK * rows.iter().max().map_or(0.0, |most| 1.0 + *most as f64) + 4.0;
    let listed = switches.len().div_ceil(2);
    let mut svg = Svg::new(
        &format!("{}: test loss over time, seed {}", record.name, seed.unwrap_or(&0)),
        ground + BOTTOM + if listed > 0 { 26.0 + ROW * listed as f64 } else { 0.0 },
    );
    svg.legend(left, lines.iter().map(|(name, _, colour)| (*name, *colour)));
    svg.vertical(&y, (left, right), "test loss");
    let changes = record.cell.changes(x.high);
    let seen = changes.len() <= MOST_CHANGES;
    let title =
        if seen { "grey: the network changes".into() } else { format!("the network changes {} times", changes.len()) };
    svg.horizontal(&x, (bottom, ground), &format!("seconds ({title})"));
    for change in changes.into_iter().filter(|_| seen) {
        svg.line((x.at(change), TOP), (x.at(change), ground), "#ccc", 1.0);
    }
    if let Some(target) = target {
        let at = y.at(target);
        svg.line((left, at), (right, at), "#000", 0.7);
        svg.label(right - 4.0, at - 5.0, "end", "black", &format!("target {target:.3}"));
    }
    for (_, points, colour) in &lines {
        svg.polyline(points.iter().map(|(at_s, loss)| (x.at(*at_s), y.at(*loss))), colour);
    }
    if listed > 0 {
        let more = if more > 0 { format!(" (and {more} more)") } else { String::new() };
        let text = format!("What flexcomm runs up to the target, from when on{more}:");
        svg.label(left, ground + BOTTOM + 8.0, "start", "black", &text);
    }
    for (index, ((switch, place), row)) in switches.iter().zip(&places).zip(rows).enumerate() {
        let (number, y) = ((index + 1).to_string(), bottom + MARK * (row as f64 + 0.5) + 2.0);
        svg.dot((*place, y), 8.0, "#c0392b", &format!("{:.0} s: {}", switch.at_s, switch.strategy));
        svg.label(*place, y + 4.0, "middle", "white", &number);
        let (column, line) = ((index / listed) as f64, (index % listed) as f64);
        let (column, y) = (left + 400.0 * column, ground + BOTTOM + 26.0 + ROW * line);
        svg.label(column + 16.0, y, "end", "#c0392b", &number);
        svg.label(column + 24.0, y, "start", "black", &cut(&format!("{:.1} s: {}", switch.at_s, switch.strategy), 54));
    }
    svg.end()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adaptive::{Experiments, RatedPrediction};
    use crate::reaction::Reactions;
    use crate::summary::tests::{record, summary};

    fn is_whole(chart: &str) {
        let ends = chart.starts_with("<svg ") && chart.ends_with("</svg>\n");
        assert!(ends && !chart.contains("NaN") && !chart.contains("inf"), "{chart}");
    }

    #[test]
    fn charts_show_what_there_is() {
        let mut cell = record("a-1", "a<b", 60.0, 50.0, Some(100.0));
        let line = Line { at_s: vec![0.0, 10.0, 100.0], losses: vec![2.0, 1.0, 0.4] };
        cell.baselines.lines.insert(DENSE.into(), line.clone());
        let switch = |at_s: f64, strategy: &str| Switch { step: 3, at_s, version: 1, strategy: strategy.into() };
        // The second is no other strategy, the last comes after the target.
        let switches = [(0.0, "w"), (10.0, "w"), (20.0, "x & y"), (21.0, "z"), (101.0, "late")];
        let switches = switches.map(|(at_s, strategy)| switch(at_s, strategy)).to_vec();
        cell.flexcomm[0] = Adapted { line, switches, ..cell.flexcomm[0].clone() };
        let chart = timeline(&cell);
        assert_eq!((chart.matches("<polyline").count(), chart.matches("<title>20 s: x &amp; y").count()), (3, 1));
        assert_eq!(chart.matches("<circle").count(), 3, "{chart}");
        let mut many = cell.clone();
        many.flexcomm[0].switches = (0..60).map(|at| switch(f64::from(at), &at.to_string())).collect();
        let many = timeline(&many);
        assert!(many.matches("<circle").count() == 40 && many.contains("from when on (and 20 more):"), "{many}");
        for part in
            [">target 0.500</text>", ">test loss</text>", ">3</text>", ">20.0 s: x &amp; y</text>", ">21.0 s: z</text>"]
        {
            assert!(chart.contains(part), "no {part:?} in {chart}");
        }
        assert!(chart.contains("seconds (grey: the network changes)") && chart.matches("#ccc").count() > 5, "{chart}");
        cell.cell.phases.iter_mut().for_each(|phase| phase.seconds = 0.5);
        let chart = timeline(&cell);
        assert!(chart.contains("seconds (the network changes 200 times)") && !chart.contains("#ccc"), "{chart}");
        let summary = summary(&[cell]);
        let chart = groups("By family", &summary.by_family);
        assert!(chart.contains("a&lt;b (1)"));
        assert_eq!(chart.matches("<circle").count(), summary.by_family[0].compared.len());
        is_whole(&chart);
        is_whole(&timeline(&record("b", "b", 60.0, 50.0, None)));
        is_whole(&groups("Nothing", &[]));
        [experiments(&[]), reactions(&[]), predictions(&[])].iter().for_each(|chart| is_whole(chart));
    }

    #[test]
    fn marks_do_not_lie_on_each_other() {
        assert_eq!(rows_of(&[0.0, 5.0, 9.0, 20.0, 24.0, 25.0], 10.0), [0, 1, 2, 0, 1, 2]);
    }

    /// Flexcomm takes 100 s for the target in one cell, and 50 s in the other.
    fn two() -> [Record; 2] {
        let [mut first, mut second] =
            [("b-1", 100.0), ("a-1", 50.0)].map(|(name, s)| record(name, &name[..1], 60.0, 50.0, Some(s)));
        let (run, other) = (&mut first.flexcomm[0], &mut second.flexcomm[0]);
        run.experiments = Experiments { seconds: 10.0, shadow_seconds: 5.0, ..Experiments::default() };
        other.experiments.seconds = 20.0;
        run.reactions = Reactions { after_s: vec![4.0, 1.0], missed: 1, ..Reactions::default() };
        other.reactions = Reactions { after_s: vec![100.0], ..Reactions::default() };
        let rated = |predicted_s, true_s| RatedPrediction { at_s: 0.0, strategy: String::new(), predicted_s, true_s };
        run.predictions = vec![rated(0.1, 0.2), rated(0.0, 1.0)];
        other.predictions = vec![rated(3.0, 1.0)];
        [first, second]
    }

    /// The numbers behind one attribute of an element.
    fn numbers(chart: &str, element: &str, attribute: &str) -> Vec<f64> {
        let of = |line: &str| line.split(&format!(" {attribute}=\"")).nth(1)?.split('"').next()?.parse().ok();
        chart.lines().filter(|line| line.starts_with(element)).filter_map(of).collect()
    }

    #[test]
    fn experiments_are_shown_over_the_time_to_the_target() {
        let chart = experiments(&two());
        is_whole(&chart);
        let widths = numbers(&chart, "<rect x", "width");
        // 40 % of a-1, which comes first, fills the axis.
        let whole = WIDTH - RIGHT - LEFT;
        let expected = [whole, 0.0, whole * 0.25, whole * 0.125];
        assert!(widths.iter().zip(expected).all(|(a, b)| (a - b).abs() < 0.2) && widths.len() == 4, "{widths:?}");
        assert!(chart.find(">a-1<") < chart.find(">b-1<") && chart.contains(">40 %<"), "{chart}");
    }

    #[test]
    fn reactions_are_shown_with_those_that_never_came() {
        let chart = reactions(&two());
        is_whole(&chart);
        assert!(chart.contains(">30 s to 2 min: 3/4<") && chart.matches("<polyline").count() == 1, "{chart}");
        let end = format!("{:.1},{:.1}\" fill", WIDTH - RIGHT, TOP + 0.25 * HEIGHT);
        assert!(chart.contains(&end), "no {end} in {chart}");
    }

    #[test]
    fn predictions_stand_beside_what_came() {
        let chart = predictions(&two());
        is_whole(&chart);
        for part in ["<title>b-1: 0.100 s predicted, 0.200 s came", ">2 predictions<", ">off by 150 % at the median,<"]
        {
            assert!(chart.contains(part), "no {part:?} in {chart}");
        }
        let dots = numbers(&chart, "<circle", "cx").into_iter().zip(numbers(&chart, "<circle", "cy"));
        // Too little is below the diagonal, which goes from the left bottom to the right top of a square.
        let (left, top) = (LEFT / 2.0, TOP + HEIGHT + 140.0);
        let above: Vec<bool> = dots.map(|(x, y)| top - y > x - left).collect();
        assert_eq!(above, [false, true]);
    }
}
