"""The paper's instructions: Table 7 for contrastive training, Tables 8 and 9 for evaluation on MTEB(eng, v1)."""

from typing import Literal

Sides = Literal["both", "query"]

# Table 7
TRAINING_INSTRUCTIONS = {
    "AGNEWS": "Given a news title, retrieve relevant articles.",
    "ALLNLI": "Given a premise, retrieve a hypothesis that is entailed by the premise.",
    "AMAZONQA": "Given a question, retrieve Amazon posts that answer the question.",
    "CONCURRENTQA": "Given a multi-hop question, retrieve documents that can help answer the question.",
    "FEVER": "Given a claim, retrieve documents that support or refute the claim.",
    "GITHUBISSUE": "Given a question, retrieve questions from Github that are duplicates to the given question.",
    "GOOAQ": "Given a question, retrieve relevant documents that best answer the question.",
    "MEDMCQA": "Given a medical question, retrieve relevant passages that answer the question.",
    "MEDMCQA_CLUST": "Identify the main category of medical exams based on their questions and answers.",
    "MSMARCO": "Given a web search query, retrieve relevant passages that answer the query.",
    "NPR": "Given a news title, retrieve relevant articles.",
    "PAQ": "Given a question, retrieve Wikipedia passages that answer the question.",
    "PUBMEDQA": "Given a medical question, retrieve documents that best answer the question.",
    "QQP": "Given a question, retrieve questions from Quora forum that are semantically equivalent to the given question.",
    "SENTENCECOMP": "Given a sentence, retrieve semantically equivalent summaries.",
    "STACKEXCHANGE": "Given a Stack Exchange post, retrieve posts that are duplicates to the given post.",
    "STACKOVERFLOW": "Retrieve duplicate questions from StackOverflow forum.",
    "STS12": "Retrieve semantically similar text.",
    "STSBENCHMARK": "Retrieve semantically similar text.",
    "TRIVIAQA": "Given a question, retrieve documents that answer the question.",
    "WIKIHOW": "Given a Wikihow post, retrieve titles that best summarize the post.",
    "YAHOO_CLUST": "Identify the main topic of Yahoo posts based on their titles and answers.",
}

_STS = "Retrieve semantically similar text."
_CLUSTERING_P2P = "Identify the main and secondary category of {} papers based on their titles and abstracts."
_CLUSTERING_S2S = "Identify the main and secondary category of {} papers based on their titles."
_CLUSTERING = "Identify the topic or theme of {} posts based on their titles."

# Tables 8 and 9; rows that cover several tasks are expanded. The row <dataset>ClusteringP2P also applies to Reddit and
# StackExchange; the row STS covers STS12 to STS22 and STSBenchmark. Two errors of the tables are corrected: "claim ." of SciFact,
# and the word "Document" after ArguAna's instruction, which is the label of a field.
_CQADUPSTACK = (
    "Given a question, retrieve detailed question descriptions from Stackexchange that are duplicates to the given "
    "question."
)
_CQADUPSTACK_FORUMS = "Android English Gaming Gis Mathematica Physics Programmers Stats Tex Unix Webmasters Wordpress"
RETRIEVAL_INSTRUCTIONS = {
    "ArguAna": "Given a claim, find documents that refute the claim.",
    "CQADupstackRetrieval": _CQADUPSTACK,
    **{
        f"CQADupstack{forum}Retrieval": _CQADUPSTACK for forum in _CQADUPSTACK_FORUMS.split()
    },  # mteb runs it as these tasks
    "ClimateFEVER": "Given a claim about climate change, retrieve documents that support or refute the claim.",
    "DBPedia": "Given a query, retrieve relevant entity descriptions from DBPedia.",
    "FEVER": "Given a claim, retrieve documents that support or refute the claim.",
    "FiQA2018": "Given a financial question, retrieve user replies that best answer the question.",
    "HotpotQA": "Given a multi-hop question, retrieve documents that can help answer the question.",
    "MSMARCO": "Given a web search query, retrieve relevant passages that answer the query.",
    "NFCorpus": "Given a question, retrieve relevant documents that best answer the question.",
    "NQ": "Given a question, retrieve Wikipedia passages that answer the question.",
    "QuoraRetrieval": "Given a question, retrieve questions that are semantically equivalent to the given question.",
    "SCIDOCS": "Given a scientific paper title, retrieve paper abstracts that are cited by the given paper.",
    "SciFact": "Given a scientific claim, retrieve documents that support or refute the claim.",
    "TRECCOVID": "Given a query on COVID-19, retrieve documents that answer the query.",
    "Touche2020": "Given a question, retrieve detailed and persuasive arguments that answer the question.",
}
RERANKING_INSTRUCTIONS = {
    "AskUbuntuDupQuestions": "Retrieve duplicate questions from AskUbuntu forum.",
    "MindSmallReranking": "Given a user browsing history, retrieve relevant news articles.",
    "SciDocsRR": "Given a title of a scientific paper, retrieve the relevant papers.",
    "StackOverflowDupQuestions": "Retrieve duplicate questions from StackOverflow forum.",
}
OTHER_INSTRUCTIONS = {
    "AmazonCounterfactualClassification": "Given an Amazon customer review, classify it as either counterfactual or "
    "not-counterfactual.",
    "AmazonPolarityClassification": "Given an Amazon review, classify its main sentiment into positive or negative.",
    "AmazonReviewsClassification": "Given an Amazon review, classify it into its appropriate rating category.",
    "ArxivClusteringP2P": _CLUSTERING_P2P.format("Arxiv"),
    "ArxivClusteringS2S": _CLUSTERING_S2S.format("Arxiv"),
    "BIOSSES": "Retrieve semantically similar text from the biomedical field.",
    "Banking77Classification": "Given a online banking query, find the corresponding intents.",
    "BiorxivClusteringP2P": _CLUSTERING_P2P.format("Biorxiv"),
    "BiorxivClusteringS2S": _CLUSTERING_S2S.format("Biorxiv"),
    "EmotionClassification": "Given a Twitter message, classify the emotion expressed into one of the six emotions: anger, fear, "
    "joy, love, sadness, and surprise.",
    "ImdbClassification": "Given an IMDB movie review, classify its sentiment into positive or negative.",
    "MTOPDomainClassification": "Given a user utterance, classify the domain in task-oriented conversation.",
    "MTOPIntentClassification": "Given a user utterance, classify the intent in task-oriented conversation.",
    "MassiveIntentClassification": "Given a user utterance, find the user intents.",
    "MassiveScenarioClassification": "Given a user utterance, find the user scenarios.",
    "MedrxivClusteringP2P": _CLUSTERING_P2P.format("Medrxiv"),
    "MedrxivClusteringS2S": _CLUSTERING_S2S.format("Medrxiv"),
    "RedditClustering": _CLUSTERING.format("Reddit"),
    "RedditClusteringP2P": _CLUSTERING_P2P.format("Reddit"),
    **dict.fromkeys(("SICK-R", "STS12", "STS13", "STS14", "STS15", "STS16", "STS17", "STS22", "STSBenchmark"), _STS),
    "SprintDuplicateQuestions": "Retrieve duplicate questions from Sprint forum.",
    "StackExchangeClustering": _CLUSTERING.format("StackExchange"),
    "StackExchangeClusteringP2P": _CLUSTERING_P2P.format("StackExchange"),
    "SummEval": "Given a news summary, retrieve other semantically similar summaries.",
    "ToxicConversationsClassification": "Given comments, classify them as either toxic or not toxic.",
    "TweetSentimentExtractionClassification": "Given a tweet, classify its sentiment as either positive, negative, or neutral.",
    "TwentyNewsgroupsClustering": "Identify the topic or theme of the given news articles.",
    "TwitterSemEval2015": "Given a tweet, retrieve tweets that are semantically similar.",
    "TwitterURLCorpus": "Given a tweet, retrieve tweets that are semantically similar.",
}
EVALUATION_INSTRUCTIONS = {**RETRIEVAL_INSTRUCTIONS, **RERANKING_INSTRUCTIONS, **OTHER_INSTRUCTIONS}


def with_instruction(template: str, instruction: str) -> str:
    """Return the text before an input.

    Raises:
        ValueError: The template does not contain `{instruction}`.
    """
    if "{instruction}" not in template:
        raise ValueError(f"the template {template!r} does not contain {{instruction}}; add it")
    return template.replace("{instruction}", instruction)


def mteb_prompts(template: str = "{instruction} ", sides: Sides = "both") -> dict[str, str]:
    """Return prompts by the names that mteb looks up: `TASK`, or `TASK-query` and `TASK-document` for retrieval and reranking.

    Args:
        template: Text before each input; the paper does not say what separates instruction and input.
        sides: "both" puts the instruction before queries and documents, as in the authors' evaluation; "query" before queries
            only.

    Raises:
        ValueError: The template does not contain `{instruction}`.
    """
    prompts = {task: with_instruction(template, text) for task, text in EVALUATION_INSTRUCTIONS.items()}
    for task in (*RETRIEVAL_INSTRUCTIONS, *RERANKING_INSTRUCTIONS):
        prompt = prompts.pop(task)
        prompts |= {f"{task}-query": prompt, f"{task}-document": prompt if sides == "both" else ""}
    return prompts
