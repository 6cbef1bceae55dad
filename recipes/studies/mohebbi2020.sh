#!/usr/bin/env bash
# The re-implementation of Mohebbi and Rajaei 2020: every table and figure, with BERT-base from the Hub. See
# houlsby2019.sh on how to use it. The papers' test scores are the server's.
source "$(dirname "${BASH_SOURCE[0]}")/common.bash"
sweep() { attempt python recipes/studies/sweep.py "$@" ${FLAGS-} ${DRY_RUN-}; }
glue() { sweep recipes/glue.py $glue_data "$@"; }

# Tables 1 and 2. Runs also count the last classifier: 1,191,170 parameters are table 1's 1,189,632, and 1,538 more.
glue --task all --preset mohebbi2020 --method houlsby --share_layers 0 1 3 --seed 0 --predict \
    --output_dir runs/m2
glue --task all --preset mohebbi2020 --method full --seed 0 --predict --output_dir runs/m2
after python recipes/studies/study_table.py runs/m2

# Table 3: 12 of the 17 further tasks
sweep recipes/studies/paper_tasks.py --data "$additional" --preset mohebbi2020 --method houlsby full --seed 0 \
    --task crowdflower_{airline,corporate_messaging,disasters,economic_news_relevance,emotion,political_audience} \
    crowdflower_{political_bias,political_message,primary_emotions,progressive_opinion,us_economic_performance} \
    news_aggregator --output_dir runs/m3
after python recipes/studies/study_table.py runs/m3

# Figure 8. The paper does not say which of its models it is; here it is "not shared".
glue --task cola --preset mohebbi2020 --output_dir runs/m8
after python recipes/studies/figure.py ablation runs/m8/cola/*
