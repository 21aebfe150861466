"""SQL views and panels of retrieval: `latentmill query` knows the views by name, `latentmill panel` shows the panels."""

from stages.pipelines import Panel, View

VIEWS = {
    "lexical_wins": View(
        "select ranks.query, path, qualified_name, encoder, lexical, semantic, hybrid, ranks.overlap "
        "from ranks join units using (unit_id) where split = 'test' and mode = 'plain' "
        "and lexical = 1 and semantic > 1 order by semantic desc, ranks.query",
        "test queries whose unit lexical search ranks first and semantic search does not",
        needs=("ranks", "units"),
    ),
    "unused_pairs": View(
        "select rejected, detail, pairs.query, path, first_line from pairs join units using (unit_id) where rejected is not null "
        "order by rejected, path, first_line",
        "pairs that are not used, and why",
        needs=("pairs", "units"),
    ),
}

PANELS = (
    Panel(
        "skipped",
        "Files that have no units, by reason",
        "select skipped, count(*) as files, min(path) as example from sources "
        "where skipped is not null group by skipped order by files desc",
    ),
    Panel(
        "pairs",
        "Pairs by split, and why others are not used",
        "select coalesce(rejected, split) as pairs, rejected is null as "
        "used, count(*) as number, min(query) as example from pairs group by all order by used desc, number desc",
    ),
    Panel(
        "packages",
        "Mean training loss by top-level module",
        "select package, count(*) as draws, avg(loss) as loss, avg(rank) as "
        "rank from train join pairs using (pair_id) where train.split = 'train' group by package order by loss desc",
    ),
    Panel(
        "never_first",
        "Training pairs that never reached rank 1 in their batch",
        "select pair_id, any_value(pairs.query) as query, "
        "any_value(package) as package, count(*) as draws, min(rank) as best_rank, avg(loss) as loss from train join pairs "
        "using (pair_id) where train.split = 'train' group by pair_id having min(rank) > 1 order by best_rank desc, query",
    ),
    Panel("lexical_wins", "Test queries that lexical search wins and the model loses", "select * from lexical_wins"),
    Panel(
        "loss",
        "Mean training loss and share of rank 1 by hundred steps",
        "select (step - 1) // 100 * 100 + 1 as first_step, "
        "max(step) as last_step, avg(loss) as loss, avg(case when rank = 1 then 1 else 0 end) as first from train "
        "where split = 'train' group by 1 order by 1",
    ),
    Panel(
        "validation",
        "MRR of the held-out pairs by step",
        "select step, avg(1 / rank) as mrr, count(*) as pairs from train where split = 'validation' group by step order by step",
    ),
)
